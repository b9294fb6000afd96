"""Views of prepared pairs: every token is a target once, and nothing is copied."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.data.store.indexed_dataset import IndexedWriter, open_indexed
from isthmus.data.store.sample_views import chat_samples, preference_samples, text_samples
from isthmus.errors import DataError

DOCUMENTS = [[[1, 2, 3, 4, 5], [6, 7]], [[8]], [], [[9, 10]], [list(range(20, 31))]]


@pytest.mark.parametrize("seq_length", [1, 3, 5, 100])
def test_windows_have_each_token_as_target_once(tmp_path, seq_length):
    with IndexedWriter(tmp_path / "t", np.uint16) as writer:
        for document in DOCUMENTS:
            for sequence in document:
                writer.add(sequence)
            writer.end_document()
    pair = open_indexed(tmp_path / "t")
    store, counts = text_samples(pair, seq_length)
    full = [[token for sequence in document for token in sequence] for document in DOCUMENTS]
    expected = [
        document[at : at + seq_length + 1] for document in full for at in range(0, len(document) - 1, seq_length)
    ]
    assert [store[k][0].tolist() for k in range(len(store))] == expected
    assert sum(int(store[k][1][1:].sum()) for k in range(len(store))) == sum(
        len(document) - 1 for document in full if document
    )
    across, none_left = text_samples(pair, seq_length, crosses_documents=True)
    stream = [token for document in full for token in document]
    expected = [stream[at : at + seq_length + 1] for at in range(0, len(stream) - 1, seq_length)]
    assert [across[k][0].tolist() for k in range(len(across))] == expected and none_left.changes() == []
    assert counts.changes() == ["2 dropped without loss tokens"]
    assert np.shares_memory(store[0][0], pair.tokens)
    assert len(set(store.groups.tolist())) == len(store)


def test_chats_are_truncated_or_dropped(tmp_path):
    with IndexedWriter(tmp_path / "c", np.uint16, masked=True) as writer:
        for tokens, mask in (
            ([1, 2, 3], [0, 1, 1]),
            ([4, 5, 6, 7], [0, 0, 0, 1]),
            ([8, 9, 1, 2], [0, 0, 1, 1]),
            ([3], [0]),
        ):
            writer.add(tokens, mask)
        writer.end_documents([2, 2])
    pair = open_indexed(tmp_path / "c")
    cut, counts = chat_samples(pair, 2, "truncate")
    assert [(tokens.tolist(), mask.tolist()) for tokens, mask in (cut[k] for k in range(len(cut)))] == [
        ([1, 2, 3], [0, 1, 1]),
        ([8, 9, 1], [0, 0, 1]),
    ]
    assert cut.groups.tolist() == [0, 1]
    assert counts.changes() == ["1 cut to seq_length", "2 dropped without loss tokens"]
    dropped, counts = chat_samples(pair, 2, "drop")
    assert [dropped[k][0].tolist() for k in range(len(dropped))] == [[1, 2, 3]]
    assert counts.changes() == ["2 dropped as too long", "1 dropped without loss tokens"]
    assert len(chat_samples(pair, 3, "truncate")[0]) == 3


def test_pairs_are_truncated_or_dropped(tmp_path):
    sequences = [
        *(([1, 2, 3], [0, 1, 1]), ([1, 2, 3, 4], [0, 1, 1, 1])),  # cut, they are the same
        *(([1, 5], [0, 1]), ([1, 2, 3, 4], [0, 1, 1, 1])),
        *(([1, 5, 6], [0, 1, 1]), ([6, 7, 8, 9], [0, 0, 0, 1])),  # nothing is left of the second
        *(([1, 5], [0, 1]), ([1, 6, 7], [0, 1, 1])),
    ]
    with IndexedWriter(tmp_path / "p", np.uint16, masked=True) as writer:
        for tokens, mask in sequences:
            writer.add(tokens, mask)
        writer.end_documents([2] * 4)
    pair = open_indexed(tmp_path / "p")
    cut, counts = preference_samples(pair, 2, "truncate")
    assert [cut[k][0].tolist() for k in range(len(cut))] == [[1, 5], [1, 2, 3], [1, 5], [1, 6, 7]]
    assert cut.groups[::2].tolist() == cut.groups[1::2].tolist()
    assert counts.changes() == ["1 cut to seq_length", "2 dropped without loss tokens"]
    dropped, counts = preference_samples(pair, 2, "drop")
    assert [dropped[k][0].tolist() for k in range(len(dropped))] == [[1, 5], [1, 6, 7]]
    assert counts.changes() == ["3 dropped as too long"]
    with IndexedWriter(tmp_path / "q", np.uint16, masked=True) as writer:
        writer.add([1, 2], [0, 1])
        writer.end_document()
    with pytest.raises(DataError, match="not every document is a pair of answers"):
        preference_samples(open_indexed(tmp_path / "q"), 2, "drop")
