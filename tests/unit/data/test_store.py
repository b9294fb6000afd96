"""A store comes back as it was, and a damaged one is refused."""

from __future__ import annotations

import errno
import json
import os

import numpy as np
import pytest

from isthmus.data.store import SampleStore
from isthmus.errors import DataError, MissingInput, NoSpace

SAMPLES = [([1, 2, 3], [0, 1, 1]), ([4, 5], [1, 1]), ([], []), ([6, 700000, 8, 9], [0, 0, 0, 1])]


def store() -> SampleStore:
    return SampleStore.from_samples(SAMPLES, groups=[0, 0, 1, 2])


def test_samples_lengths_and_counts():
    s = store()
    assert len(s) == 4
    assert [(t.tolist(), m.tolist()) for t, m in (s[k] for k in range(4))] == SAMPLES
    assert s[-1][0].tolist() == SAMPLES[3][0]
    with pytest.raises(IndexError):
        s[4]
    assert s.lengths.tolist() == [3, 2, 0, 4]
    assert s.max_token_id == 700000
    assert s.num_learned == 4  # the first token of the second sample is no target
    assert s.tokens.dtype == np.int32
    assert s.select([3, 0]).groups.tolist() == [2, 0]


def test_saved_and_opened(tmp_path):
    s = store()
    s.save(tmp_path / "deep" / "store")
    back = SampleStore.open(tmp_path / "deep" / "store")
    assert isinstance(back.tokens, np.memmap)
    assert back.digest() == s.digest() != s.select([0, 1]).digest()
    assert back.groups.tolist() == s.groups.tolist()
    assert sorted(os.listdir(tmp_path / "deep")) == ["store"]
    SampleStore.from_samples([]).save(tmp_path / "empty")
    assert len(SampleStore.open(tmp_path / "empty")) == 0


def test_existing_folder_is_not_touched(tmp_path):
    with pytest.raises(NoSpace, match="exists already"):
        store().save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_behind_when_the_disk_is_full(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoSpace, match="the disk is full; the samples need"):
        store().save(tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


def test_damaged_stores_are_refused(tmp_path):
    with pytest.raises(MissingInput):
        SampleStore.open(tmp_path / "none")
    store().save(tmp_path / "s")
    tokens, offsets, meta = (tmp_path / "s" / name for name in ("tokens.bin", "offsets.bin", "store.json"))
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-2])
    with pytest.raises(DataError, match=r"tokens\.bin: 34 bytes, wanted 36"):
        SampleStore.open(tmp_path / "s")
    tokens.write_bytes(whole)
    good = offsets.read_bytes()
    offsets.write_bytes(np.array([0, 3, 2, 5, 9], dtype="<i8").tobytes())
    with pytest.raises(DataError, match="go backwards"):
        SampleStore.open(tmp_path / "s")
    offsets.write_bytes(np.array([0, 3, 5, 5, 10], dtype="<i8").tobytes())
    with pytest.raises(DataError, match="offsets end at 10"):
        SampleStore.open(tmp_path / "s")
    offsets.write_bytes(good)
    values = json.loads(meta.read_text())
    meta.write_text(json.dumps({**values, "format": 2}))
    with pytest.raises(DataError, match="format 2, wanted 1"):
        SampleStore.open(tmp_path / "s")
    meta.write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        SampleStore.open(tmp_path / "s")
    meta.unlink()
    with pytest.raises(MissingInput, match=r"store\.json"):
        SampleStore.open(tmp_path / "s")
