"""Best-fit-decreasing packing: as few sequences as possible, nothing cut, nothing reordered by chance."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from isthmus.errors import DataError


def check_fit(sizes: npt.NDArray[np.int64], capacity: int) -> None:
    """Raise DataError when an item is longer than ``capacity``."""
    if len(sizes) and int(sizes.max()) > capacity:
        longest = int(sizes.argmax())
        raise DataError(
            f"sample {longest} has {int(sizes[longest])} tokens, the sequence length is {capacity}. "
            "Prepare the data with this seq_length, or raise data.seq_length."
        )


def pack(lengths: Sequence[int] | npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Put items into bins of at most ``capacity`` and return the item numbers of each bin.

    The longest item comes first; each goes into the fullest bin that still takes it. Equal lengths keep their order, so
    the result is a function of the arguments alone. Open bins are kept by the room they have left, of which there are
    at most ``capacity`` values: time is n log(capacity).

    Raises:
        DataError: an item is longer than ``capacity``.
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
