"""Samples in bins of limited or of equal size."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from isthmus.errors import DataError


def check_fit(sizes: npt.NDArray[np.int64], capacity: int) -> None:
    if len(sizes) and int(sizes.max()) > capacity:
        longest = int(sizes.argmax())
        raise DataError(
            f"sample {longest} has {int(sizes[longest])} tokens, the sequence length is {capacity}. "
            "Prepare the data with this seq_length, or raise data.seq_length."
        )


def pack(lengths: Sequence[int] | npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Pack items into bins of at most ``capacity`` and return the item numbers of each bin.

    The longest item comes first; each goes into the fullest bin that it fits, equal lengths in their order. Open bins
    are indexed by free space, so the time is n log(capacity). Raises DataError for an item longer than ``capacity``.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    check_fit(sizes, capacity)
    bins: list[list[int]] = []
    rooms: list[int] = []
    by_room: dict[int, list[int]] = {}
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        at = bisect_left(rooms, size)
        if at == len(rooms):
            bins.append([item])
            number, room = len(bins) - 1, capacity - size
        else:
            room = rooms[at]
            number = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
            bins[number].append(item)
            room -= size
        if room:
            if room not in by_room:
                insort(rooms, room)
                by_room[room] = []
            by_room[room].append(number)
    return bins


@dataclass(frozen=True, slots=True)
class Bins:
    """Bins as two arrays, 8 bytes per item and 8 per bin, since a large text has many windows."""

    items: npt.NDArray[np.int64]
    """[items], bin after bin."""
    bounds: npt.NDArray[np.int64]
    """[bins + 1]; bin k is ``items[bounds[k]:bounds[k + 1]]``."""

    @classmethod
    def packed(cls, lengths: npt.NDArray[np.int64], capacity: int, first: int = 0) -> Bins:
        """The bins of :func:`pack`, of items numbered from ``first``; full bins of one item are vectorized."""
        full, rest = np.flatnonzero(lengths == capacity), np.flatnonzero(lengths != capacity)
        bins = pack(lengths[rest], capacity)
        order = np.fromiter(chain.from_iterable(bins), dtype=np.int64, count=len(rest))
        sizes = np.fromiter(map(len, bins), dtype=np.int64, count=len(bins))
        bounds = np.concatenate([np.arange(len(full) + 1), len(full) + np.cumsum(sizes)])
        return cls(np.concatenate([full, rest[order]]) + first, bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, number: int) -> list[int]:
        items: list[int] = self.items[self.bounds[number] : self.bounds[number + 1]].tolist()
        return items


@dataclass(frozen=True, slots=True)
class SingleItems:
    """One bin per item, from ``first`` to ``end``."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, number: int) -> list[int]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return [self.first + number]


def balance(sizes: Sequence[int], num_bins: int) -> list[list[int]]:
    """Distribute items over bins of about equal total size; the items of a bin are in ascending order."""
    totals = [(0, number) for number in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        total, number = totals[0]
        bins[number].append(item)
        heapq.heapreplace(totals, (total + sizes[item], number))
    return [sorted(items) for items in bins]
