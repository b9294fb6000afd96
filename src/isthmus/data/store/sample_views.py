"""Samples of at most ``seq_length`` + 1 tokens out of a pair of indexed files, without copying or reading tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from isthmus.data.store.indexed_dataset import IndexedDataset
from isthmus.data.store.sample_store import SampleStore, TokenSource
from isthmus.errors import DataError


@dataclass(frozen=True, slots=True)
class FitStats:
    """What became of sequences that did not fit."""

    truncated: int = 0
    dropped_overlong: int = 0
    dropped_nothing_to_learn: int = 0

    def __add__(self, other: FitStats) -> FitStats:
        """Both together."""
        return FitStats(
            self.truncated + other.truncated,
            self.dropped_overlong + other.dropped_overlong,
            self.dropped_nothing_to_learn + other.dropped_nothing_to_learn,
        )

    def words(self) -> str:
        """For people; empty when there was none."""
        counts = {
            "cut to seq_length": self.truncated,
            "dropped as too long": self.dropped_overlong,
            "dropped with nothing to learn": self.dropped_nothing_to_learn,
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def text_samples(pair: IndexedDataset, seq_length: int) -> tuple[SampleStore, FitStats]:
    """Windows over the documents of a pair; neighbours share one token, so each token is a target exactly once.

    Each window is a group of its own: a document may be the whole of a file.
    """
    bounds = np.append(pair.starts, len(pair.tokens))[pair.documents]
    totals = np.diff(bounds)
    counts = np.maximum(-(-(totals - 1) // seq_length), 0)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    within = (np.arange(len(first), dtype=np.int64) - first) * seq_length
    lengths = np.minimum(np.repeat(totals, counts) - within, seq_length + 1)
    store = SampleStore([TokenSource.from_indexed(pair)], np.repeat(bounds[:-1], counts) + within, lengths)
    return store, FitStats(dropped_nothing_to_learn=int(np.count_nonzero(totals < 2)))


def chat_samples(
    pair: IndexedDataset, seq_length: int, overlong: Literal["truncate", "drop"]
) -> tuple[SampleStore, FitStats]:
    """The sequences of a pair with a mask; of those that are too long the masks are looked at, and of no others."""
    store = SampleStore.from_indexed(pair)
    long = store.lengths > seq_length + 1
    kept = store.lengths >= 2
    nothing = int(np.count_nonzero(~kept))
    if overlong == "drop":
        return store.select(np.flatnonzero(kept & ~long)), FitStats(0, int(np.count_nonzero(long)), nothing)
    store = store.cut(seq_length + 1)
    for index in np.flatnonzero(long):
        if not store[int(index)][1][1:].any():
            kept[index] = False
            nothing += 1
    return store.select(np.flatnonzero(kept)), FitStats(int(np.count_nonzero(long & kept)), 0, nothing)


def preference_samples(
    pair: IndexedDataset, seq_length: int, overlong: Literal["truncate", "drop"]
) -> tuple[SampleStore, FitStats]:
    """As :func:`chat_samples`, of documents that are two answers each; where one does not fit, both are left out.

    What is left out is counted once, what is cut by the answer.

    Raises:
        DataError: a document has another number of sequences.
    """
    store = SampleStore.from_indexed(pair)
    if bool(np.any(np.diff(pair.documents) != 2)):
        raise DataError(f"{pair.prefix}: not every document is a pair of answers. Prepare the records again.")
    long = (store.lengths > seq_length + 1).reshape(-1, 2)
    too_long = long.any(1) if overlong == "drop" else np.zeros(len(long), dtype=np.bool_)
    store = store.cut(seq_length + 1)
    learned = np.asarray((store.lengths >= 2).reshape(-1, 2).all(1))
    for number in np.flatnonzero(long.any(1) & learned & ~too_long):
        (chosen, mask), (rejected, other) = store[2 * int(number)], store[2 * int(number) + 1]
        learned[number] = bool(mask[1:].any() and other[1:].any()) and not np.array_equal(chosen, rejected)
    kept = learned & ~too_long
    left = FitStats(
        int(np.count_nonzero(long[kept])), int(np.count_nonzero(too_long)), int(np.count_nonzero(~learned & ~too_long))
    )
    return store.select(np.flatnonzero(np.repeat(kept, 2))), left
