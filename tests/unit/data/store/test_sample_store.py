"""A store is a view that copies nothing; saved it comes back as it was, and a damaged one is refused."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.data.store.indexed_dataset import IndexedWriter, open_indexed, write_manifest
from isthmus.data.store.sample_store import SampleStore, TokenSource
from isthmus.errors import DataError
from isthmus.files.checked_files import trusting

SAMPLES = [([1, 2, 3], [0, 1, 1]), ([4, 5], [1, 1]), ([], []), ([6, 700000, 8, 9], [0, 0, 0, 1])]


def store() -> SampleStore:
    return SampleStore.from_samples(SAMPLES, groups=[0, 0, 1, 2])


def samples(s: SampleStore) -> list[tuple[list[int], list[int]]]:
    return [(t.tolist(), m.tolist()) for t, m in (s[k] for k in range(len(s)))]


def test_samples_lengths_and_counts():
    s = store()
    assert len(s) == 4
    assert samples(s) == SAMPLES
    assert s[-1][0].tolist() == SAMPLES[3][0]
    with pytest.raises(IndexError):
        s[4]
    assert s.lengths.tolist() == [3, 2, 0, 4]
    assert (s.num_tokens, s.max_token_id) == (9, 700000)


def test_parts_of_a_store_share_its_tokens():
    s = store()
    part = s.select([3, 0])
    assert samples(part) == [SAMPLES[3], SAMPLES[0]]
    assert part.groups.tolist() == [2, 0]
    assert np.shares_memory(part[0][0], s[3][0])
    assert samples(s.truncate(2)) == [(t[:2], m[:2]) for t, m in SAMPLES]
    plain = SampleStore(
        [TokenSource.from_arrays(np.arange(9, dtype=np.uint16), None)], *(np.array(a) for a in ([1, 2], [4, 7]))
    )
    both = SampleStore.concatenated([part, plain])
    assert samples(both) == [*samples(part), ([1, 2, 3, 4], [1] * 4), ([2, 3, 4, 5, 6, 7, 8], [1] * 7)]
    assert both.groups.tolist() == [2, 0, 3, 4]
    assert np.shares_memory(both[1][0], s[0][0])
    assert samples(both.select([3, 1])) == [samples(both)[3], samples(both)[1]]
    assert len({view.digest() for view in (s, part, s.select([0, 3]), s.truncate(2), plain, both)}) == 6
    assert part.digest() == store().select([3, 0]).digest()
    with pytest.raises(DataError, match="ends beyond"):
        SampleStore(s.sources, np.array([7]), np.array([3]))
    with pytest.raises(DataError, match="differ in number"):
        SampleStore(s.sources, np.array([1]), np.array([1, 2]))


def test_a_flipped_bit_is_an_error_on_access(tmp_path):
    with IndexedWriter(tmp_path / "p", np.int32, masked=True) as writer:
        for _ in range(3):
            writer.extend(np.arange(60000), [30000, 30000], np.arange(60000) % 2)
    write_manifest(tmp_path / "p", {"pair": writer.close()})
    for suffix, place in ((".bin", 4 * 150000), (".mask.bin", 150000)):
        full = (tmp_path / f"p{suffix}").read_bytes()
        (tmp_path / f"p{suffix}").write_bytes(full[:place] + bytes([full[place] ^ 1]) + full[place + 1 :])
        s = SampleStore.from_indexed(open_indexed(tmp_path / "p"))
        if suffix == ".bin":
            assert s[0][0][:3].tolist() == [0, 1, 2]
        with pytest.raises(DataError, match=rf"p{suffix} is damaged: bytes \d+ to \d+ do not match its manifest"):
            s[5]
        with trusting():
            assert len(SampleStore.from_indexed(open_indexed(tmp_path / "p"))[5][0]) == 30000
        (tmp_path / f"p{suffix}").write_bytes(full)


def test_invalid_token_is_an_error_on_access(tmp_path):
    with IndexedWriter(tmp_path / "p", np.int32, masked=True) as writer:
        for at in (1, 4):
            writer.add([at, at + 1, at + 2], [0, 1, 1])
            writer.end_document()
    record = writer.close()
    for file in record["files"].values():
        del file["blocks"]  # as in manifests of earlier versions
    write_manifest(tmp_path / "p", {"pair": record})
    for suffix, place in ((".bin", 15), (".mask.bin", 4)):
        full = (tmp_path / f"p{suffix}").read_bytes()
        for value in (0x80, 0x40):
            (tmp_path / f"p{suffix}").write_bytes(full[:place] + bytes([value]) + full[place + 1 :])
            s = SampleStore.from_indexed(open_indexed(tmp_path / "p"))
            assert s[0][0].tolist() == [1, 2, 3]
            with pytest.raises(DataError, match=r"p\.bin: tokens 3 to 6 or their mask changed since"):
                s[1]
        (tmp_path / f"p{suffix}").write_bytes(full)
