"""Views of indexed files as samples of at most ``seq_length`` + 1 tokens, without copies."""

from __future__ import annotations

import numpy as np

from isthmus.data.store.indexed_dataset import IndexedDataset
from isthmus.data.store.sample_store import SampleStore, TokenSource
from isthmus.data.tokenize.stats import Overlong, TokenizeStats, overlong_sample
from isthmus.errors import DataError


def text_samples(
    indexed: IndexedDataset, seq_length: int, *, crosses_documents: bool = False
) -> tuple[SampleStore, TokenizeStats]:
    """Windows over documents; adjacent windows share one token, so each token is a target exactly once.

    Each window is its own group: a document may be a whole file. With ``crosses_documents`` the windows are over all
    documents, one after the other, as in Megatron-LM.
    """
    bounds = np.append(indexed.starts, len(indexed.tokens))[indexed.documents]
    if crosses_documents:
        bounds = bounds[[0, -1]]
    totals = np.diff(bounds)
    counts = np.maximum(-(-(totals - 1) // seq_length), 0)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    within = (np.arange(len(first), dtype=np.int64) - first) * seq_length
    lengths = np.minimum(np.repeat(totals, counts) - within, seq_length + 1)
    store = SampleStore([TokenSource.from_indexed(indexed)], np.repeat(bounds[:-1], counts) + within, lengths)
    return store, TokenizeStats(dropped_without_loss=int(np.count_nonzero(totals < 2)))


def chat_samples(indexed: IndexedDataset, seq_length: int, overlong: Overlong) -> tuple[SampleStore, TokenizeStats]:
    """The sequences of indexed files with a mask; only the masks of truncated sequences are read."""
    store = SampleStore.from_indexed(indexed)
    long = store.lengths > seq_length + 1
    usable = store.lengths >= 2
    without_loss = int(np.count_nonzero(~usable))
    if overlong == "drop":
        dropped = TokenizeStats(dropped_overlong=int(np.count_nonzero(long)), dropped_without_loss=without_loss)
        return store.select(np.flatnonzero(usable & ~long)), dropped
    _check_overlong(indexed, store, seq_length, overlong)
    split = int(np.count_nonzero(long)) if overlong == "split" else 0
    if split:
        counts = np.maximum(-(-(store.lengths - 1) // seq_length), 1)
        usable, long = np.repeat(usable, counts), np.repeat(long, counts)
        store = store.windows(seq_length, counts)
    store = store.truncate(seq_length + 1)
    for index in np.flatnonzero(long):
        if not store[int(index)][1][1:].any():
            usable[index] = False
            without_loss += not split
    truncated = 0 if split else int(np.count_nonzero(long & usable))
    cut = TokenizeStats(truncated=truncated, split_overlong=split, dropped_without_loss=without_loss)
    return store.select(np.flatnonzero(usable)), cut


def _check_overlong(indexed: IndexedDataset, store: SampleStore, seq_length: int, overlong: Overlong) -> None:
    longest = int(store.lengths.max(initial=0))
    if overlong == "error" and longest > seq_length + 1:
        raise DataError(f"{indexed.prefix}: {overlong_sample(longest - 1, seq_length)}")


def preference_samples(
    indexed: IndexedDataset, seq_length: int, overlong: Overlong
) -> tuple[SampleStore, TokenizeStats]:
    """:func:`chat_samples` for documents of two answers; a pair is kept or dropped as a whole.

    Dropped pairs count once, truncated answers each.
    """
    store = SampleStore.from_indexed(indexed)
    if bool(np.any(np.diff(indexed.documents) != 2)):
        raise DataError(f"{indexed.prefix}: not every document is a pair of answers. Prepare the records again.")
    _check_overlong(indexed, store, seq_length, overlong)
    long = (store.lengths > seq_length + 1).reshape(-1, 2)
    too_long = long.any(1) if overlong == "drop" else np.zeros(len(long), dtype=np.bool_)
    store = store.truncate(seq_length + 1)
    with_loss = np.asarray((store.lengths >= 2).reshape(-1, 2).all(1))
    for number in np.flatnonzero(long.any(1) & with_loss & ~too_long):
        (chosen, mask), (rejected, other) = store[2 * int(number)], store[2 * int(number) + 1]
        with_loss[number] = bool(mask[1:].any() and other[1:].any()) and not np.array_equal(chosen, rejected)
    usable = with_loss & ~too_long
    fit = TokenizeStats(
        truncated=int(np.count_nonzero(long[usable])),
        dropped_overlong=int(np.count_nonzero(too_long)),
        dropped_without_loss=int(np.count_nonzero(~with_loss & ~too_long)),
    )
    return store.select(np.flatnonzero(np.repeat(usable, 2))), fit
