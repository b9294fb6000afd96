from __future__ import annotations

from pathlib import Path

import numpy as np

from isthmus.data.store.indexed_dataset import IndexedWriter, open_indexed, write_manifest
from isthmus.data.store.sample_origin import sample_origin
from isthmus.data.store.sample_store import MockSamples, SampleStore


def indexed(prefix: Path, *, records: int) -> SampleStore:
    """Five documents: of one sequence, but the third of two. ``records`` were read from chats.jsonl."""
    with IndexedWriter(prefix, np.int32, masked=False) as writer:
        for length in (4, 5, 6, 3, 7, 4):
            writer.extend(np.arange(length, dtype=np.int32), (length,))
        writer.end_documents([1, 1, 2, 1, 1])
        pair = writer.close()
    record = {"kind": "text", "files": [{"name": "chats.jsonl"}], "report": {"records": records}, "pair": pair}
    write_manifest(prefix, record)
    return SampleStore.from_indexed(open_indexed(prefix))


def test_record_of_a_sample(tmp_path: Path) -> None:
    store = indexed(tmp_path / "a", records=5)
    results = [sample_origin(store, sample) for sample in range(6)]
    assert results == [{"file": "chats.jsonl", "record": record} for record in (1, 2, 3, 3, 4, 5)]
    shuffled = SampleStore.concatenated([indexed(tmp_path / "b", records=7), store]).select([8, 2])
    assert sample_origin(shuffled, 0) == {"file": "chats.jsonl", "record": 3}
    assert sample_origin(shuffled, 1) == {"file": str(tmp_path / "b.bin"), "sequence": 2}, "two records were dropped"
    windows = store.windows(2, np.array([1, 2, 2, 1, 3, 1]))
    assert sample_origin(windows, 7)["record"] == 4


def test_samples_without_a_file(tmp_path: Path) -> None:
    assert sample_origin(MockSamples(seq_length=4, vocab_size=9, seed=0), 3) == {}
    assert sample_origin(SampleStore.from_samples([([1, 2], [1, 1])]), 0) == {}
    store = indexed(tmp_path / "a", records=5)
    (tmp_path / "a.idx").unlink()
    assert sample_origin(store, 2) == {"file": str(tmp_path / "a.bin")}
