"""The infinite order of training sequences: datasets mixed by weight, each shuffled again in each of its epochs.

Sequence k of a set has the time (k + 1/2) / weight, and sequences are sorted by time, so the first n have each set's
share of n up to half a sequence and half of the rounding of the others (Webster's apportionment method). The sequence
at a position depends only on the position, the weights and the seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
_BLOCK = 4096
COMPUTED_FROM = 1 << 26
"""Sequences of a set from which its order is computed for each position; below, it is an array in memory."""
_ROUNDS = 8
_MIX = tuple(np.uint64(number) for number in (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31))
"""Shifts and odd factors of the finalizer of splitmix64, which changes half of the bits for each bit of the input."""


@dataclass(frozen=True, slots=True)
class MixtureSet:
    name: str
    samples: int
    """Number of samples; sets are consecutive in the store."""
    weight: float
    """Relative to the other weights."""


class MixtureSchedule:
    """The set at each position, and the index of its sequence."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights: list[float] = [weight / math.fsum(weights) for weight in weights]
        self._block: tuple[int, Int64, Int64] | None = None

    def at(self, position: int) -> tuple[int, int]:
        """(set, index of its sequence over all epochs) at a position."""
        block, within = divmod(position, _BLOCK)
        if self._block is None or self._block[0] != block:
            sets, numbers, before = self._around(block * _BLOCK)
            self._block = block, sets[before : before + _BLOCK], numbers[before : before + _BLOCK]
        return int(self._block[1][within]), int(self._block[2][within])

    def consumed(self, positions: int) -> list[int]:
        """Sequences of each set in the first ``positions``."""
        sets, _, before = self._around(positions)
        early = np.bincount(sets[:before], minlength=len(self.weights))
        return [self._first(k, positions - len(self.weights)) + int(count) for k, count in enumerate(early)]

    def _around(self, first: int) -> tuple[Int64, Int64, int]:
        """(sets, indices) around ``first`` to ``first`` + ``_BLOCK``, and their number before ``first``."""
        # The time of a position differs from it by at most half a sequence of each set.
        slack = len(self.weights)
        starts = [self._first(k, first - slack) for k in range(slack)]
        spans = [
            np.arange(start, self._first(k, first + _BLOCK + slack), dtype=np.int64) for k, start in enumerate(starts)
        ]
        numbers = np.concatenate(spans)
        sets = np.repeat(np.arange(slack, dtype=np.int64), [len(span) for span in spans])
        order = np.lexsort((sets, (numbers + 0.5) / np.array(self.weights)[sets]))
        return sets[order], numbers[order], first - sum(starts)

    def _first(self, chosen: int, time: float) -> int:
        """The first sequence of a set whose time is at least ``time``."""
        weight = self.weights[chosen]
        number = max(0, int(weight * time - 0.5) - 1)
        while (number + 0.5) / weight < time:
            number += 1
        return number


class SequenceOrder:
    """The sequence at each position; the sequences of all sets are numbered consecutively."""

    def __init__(
        self, counts: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool, computed: bool = True
    ) -> None:
        """Without ``computed`` the order of a set of any size is an array, as in versions before the computed one."""
        self.counts: list[int] = list(counts)
        self.seed = seed
        self.shuffle = shuffle
        self.computed: list[bool] = [computed and shuffle and count >= COMPUTED_FROM for count in counts]
        self.schedule: MixtureSchedule = MixtureSchedule(weights)
        self._starts = np.cumsum([0, *counts]).tolist()
        self._orders: dict[int, tuple[tuple[int, int], Int64]] = {}

    def at(self, position: int) -> int:
        chosen, number = self.schedule.at(position)
        epoch, within = divmod(number, self.counts[chosen])
        if self.shuffle:
            block, place = divmod(within, _BLOCK) if self.computed[chosen] else (0, within)
            known = self._orders.get(chosen)
            if known is None or known[0] != (epoch, block):
                known = self._orders[chosen] = (epoch, block), self._order(chosen, epoch, block)
            within = int(known[1][place])
        return int(self._starts[chosen]) + within

    def permutation(self, chosen: int, epoch: int) -> Int64:
        """The sequences of a set in the order of an epoch, numbered from 0 in the set."""
        if not self.shuffle:
            return np.arange(self.counts[chosen], dtype=np.int64)
        if self.computed[chosen]:
            blocks = range(-(-self.counts[chosen] // _BLOCK))
            return np.concatenate([self._order(chosen, epoch, block) for block in blocks])
        return self._order(chosen, epoch, 0)

    def _order(self, chosen: int, epoch: int, block: int) -> Int64:
        """The order of a set, or of one block of its positions if it is computed."""
        count = self.counts[chosen]
        # Raw bits of a counter-based generator: numpy's shuffles may change with its version.
        bits = np.random.Philox(key=np.array([self.seed % 2**64, (chosen << 40) + epoch], dtype=np.uint64))
        if not self.computed[chosen]:
            return np.argsort(bits.random_raw(count), kind="stable")
        positions = np.arange(block * _BLOCK, min(count, (block + 1) * _BLOCK), dtype=np.uint64)
        return permuted(positions, count, bits.random_raw(_ROUNDS)).astype(np.int64)

    def epochs(self, positions: int) -> list[float]:
        """The number of epochs of each set in the first ``positions``."""
        return [used / count for used, count in zip(self.schedule.consumed(positions), self.counts, strict=True)]


def permuted(positions: UInt64, count: int, keys: UInt64) -> UInt64:
    """The images of ``positions`` under a pseudo-random permutation of ``count`` numbers.

    A Feistel network permutes the numbers of an even number of bits; a result of ``count`` or more is permuted again,
    until it is below.
    """
    half = np.uint64(max(1, -(-(count - 1).bit_length() // 2)))
    mask = (np.uint64(1) << half) - np.uint64(1)
    first, factor, second, other_factor, third = _MIX

    def permute(numbers: UInt64) -> UInt64:
        left, right = numbers >> half, numbers & mask
        for key in keys:
            mixed = right + key
            mixed = (mixed ^ (mixed >> first)) * factor
            mixed = (mixed ^ (mixed >> second)) * other_factor
            left, right = right, left ^ ((mixed ^ (mixed >> third)) & mask)
        return (left << half) | right

    result = permute(positions)
    while bool((outside := result >= count).any()):
        result[outside] = permute(result[outside])
    return result
