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
_BLOCK = 4096


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
        self.weights = [weight / math.fsum(weights) for weight in weights]
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

    def __init__(self, counts: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool) -> None:
        self.counts, self.seed, self.shuffle = list(counts), seed, shuffle
        self.schedule = MixtureSchedule(weights)
        self._starts = np.cumsum([0, *counts]).tolist()
        self._orders: dict[int, tuple[int, Int64]] = {}

    def at(self, position: int) -> int:
        chosen, number = self.schedule.at(position)
        epoch, within = divmod(number, self.counts[chosen])
        if self.shuffle:
            known = self._orders.get(chosen)
            if known is None or known[0] != epoch:
                known = self._orders[chosen] = epoch, self.permutation(chosen, epoch)
            within = int(known[1][within])
        return int(self._starts[chosen]) + within

    def permutation(self, chosen: int, epoch: int) -> Int64:
        """The sequences of a set in the order of an epoch, numbered from 0 in the set."""
        if not self.shuffle:
            return np.arange(self.counts[chosen], dtype=np.int64)
        # Raw bits of a counter-based generator, sorted: numpy's shuffles may change with its version.
        bits = np.random.Philox(key=np.array([self.seed % 2**64, (chosen << 40) + epoch], dtype=np.uint64))
        return np.argsort(bits.random_raw(self.counts[chosen]), kind="stable")

    def epochs(self, positions: int) -> list[float]:
        """The number of epochs of each set in the first ``positions``."""
        return [used / count for used, count in zip(self.schedule.consumed(positions), self.counts, strict=True)]
