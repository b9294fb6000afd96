"""Windows over all documents: each token is a label once, parts are disjoint, and no window needs memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from isthmus.data.batching.batches import Batches, BatchSettings, DocumentEnds
from isthmus.data.store import token_windows
from isthmus.data.store.indexed_dataset import IndexedWriter, write_manifest
from isthmus.data.store.sample_origin import sample_origin
from isthmus.data.store.sample_store import TokenSource
from isthmus.data.store.token_windows import TokenWindows, are_many, token_source
from isthmus.errors import DataError, UsageError

EOD = 0


def prepared(folder: Path, name: str, documents: list[list[int]]) -> Path:
    with IndexedWriter(folder / name, np.int32) as writer:
        for document in documents:
            writer.add(document)
            writer.end_document()
        record = writer.close()
    write_manifest(folder / name, {"pair": record, "kind": "text"})
    return folder / name


def opened(prefix: Path) -> TokenSource:
    return token_source(str(prefix), prefix.with_name(f"{prefix.name}.json"))[0]


@pytest.fixture
def sources(tmp_path: Path) -> list[TokenSource]:
    """Two files of 41 and 23 tokens, all different, of documents of 4 tokens and an end."""
    numbers = iter(range(1, 100))
    files = []
    for name, tokens in (("a", 41), ("b", 23)):
        documents = [[next(numbers) for _ in range(4)] + [EOD] for _ in range(tokens // 5)]
        rest = [next(numbers) for _ in range(tokens % 5)]
        files.append(opened(prepared(tmp_path, name, [*documents, rest])))
    return files


def test_each_token_is_a_label_once_but_for_the_rest_of_a_file(sources: list[TokenSource]) -> None:
    windows = TokenWindows.from_sources(sources, targets=8)
    assert len(windows) == 5 + 2 and windows.num_tokens == 7 * 9
    labels = [token for k in range(len(windows)) for token in windows[k][0][1:].tolist()]
    assert labels == [*sources[0].tokens[1:41].tolist(), *sources[1].tokens[1:17].tolist()]
    assert windows.lengths.strides == (0,) and set(windows.lengths.tolist()) == {9}
    with pytest.raises(IndexError):
        windows[7]


def test_parts_are_disjoint_and_have_all_windows(sources: list[TokenSource]) -> None:
    windows = TokenWindows.from_sources(sources, targets=4)
    rest, (valid, test) = windows.split([0.2, 0.1], seed=1)
    firsts = [int(part[k][0][0]) for part in (rest, valid, test) for k in range(len(part))]
    assert sorted(firsts) == sorted(int(windows[k][0][0]) for k in range(len(windows)))
    assert (len(rest), len(valid), len(test)) == (10, 3, 2)
    again = windows.split([0.2, 0.1], seed=1)[0]
    assert again.digest() == rest.digest() != windows.split([0.2, 0.1], seed=2)[0].digest()
    assert len({part.digest() for part in (windows, rest, valid, test)}) == 4
    with pytest.raises(UsageError, match="at least one must be left"):
        windows.split([0.99], seed=1)


def test_sets_are_joined_one_after_the_other(sources: list[TokenSource]) -> None:
    sets = [TokenWindows.from_sources([source], targets=4) for source in sources]
    joined = TokenWindows.joined(sets)
    assert len(joined) == len(sets[0]) + len(sets[1])
    assert joined[len(sets[0])][0].tolist() == sets[1][0][0].tolist()
    assert sample_origin(joined, len(sets[0])) == {"file": str(sources[1].file), "window": 0}


def test_batches_attend_within_documents(sources: list[TokenSource]) -> None:
    windows = TokenWindows.from_sources(sources, targets=8)
    documents = DocumentEnds(eod=EOD, reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True)
    settings = BatchSettings(
        seq_length=8, micro_batch_size=1, global_batch_size=1, packing=True, shuffle=False, documents=documents
    )
    batches = Batches(windows, settings)
    assert batches.sequences_per_epoch == 7 and batches.tokens_per_step == 8
    (first,) = batches.step(0)
    assert first.lengths == (5, 3) and first.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert first.loss_mask is not None and first.loss_mask.tolist() == [True] * 4 + [False] + [True] * 3


def test_a_set_of_10_to_the_9_windows_needs_no_memory_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are a view of one number; batches of the first and the last step are made."""
    tokens = np.broadcast_to(np.int32(7), (10**9 * 8 + 1,))
    source = TokenSource(tokens, None, 7, "seven")
    windows = TokenWindows.from_sources([source], targets=8)
    rest, (valid,) = windows.split([0.01], seed=0)
    assert (len(windows), len(valid)) == (10**9, 10**7)
    monkeypatch.setattr(np, "arange", lambda *_, **__: pytest.fail("an array of all windows"))
    assert rest[len(rest) - 1][0].tolist() == [7] * 9


def test_the_manifest_decides_and_its_sizes_are_checked(
    tmp_path: Path, sources: list[TokenSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = [tmp_path / "a.json", tmp_path / "b.json"]
    assert not are_many(manifests, 8)
    monkeypatch.setattr(token_windows, "COMPUTED_FROM", 7)
    assert are_many(manifests, 8) and not are_many(manifests[:1], 8)
    with (tmp_path / "a.bin").open("ab") as file:
        file.write(b"1234")
    with pytest.raises(DataError, match="bytes"):
        opened(tmp_path / "a")
