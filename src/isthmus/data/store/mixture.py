"""The endless line of sequences that training takes: sets mixed by weight, each in a new order in each of its epochs.

Sequence k of a set has its turn at the time (k + 1/2) / weight, and sequences are taken in the order of their times, so
after n of them each set has had its share of n, to within half a sequence and half of what rounding the others adds
up to (this is Webster's method of dealing out seats). What stands at a place is a function of the place, the
weights and the seed alone.
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
    """One set of a mix."""

    name: str
    samples: int
    """How many of the store's samples are its own; sets lie in the store one after the other."""
    weight: float
    """Relative to the weights of the others."""


class MixtureSchedule:
    """Which set has its turn at which place, and the how manieth of its sequences is meant."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Take weights above 0, relative to each other."""
        self.weights = [weight / math.fsum(weights) for weight in weights]
        self._block: tuple[int, Int64, Int64] | None = None

    def at(self, place: int) -> tuple[int, int]:
        """(set, number of its sequence, counted from 0 without end) at a place, counted from 0."""
        block, within = divmod(place, _BLOCK)
        if self._block is None or self._block[0] != block:
            self._block = block, *self._turns(block * _BLOCK)
        return int(self._block[1][within]), int(self._block[2][within])

    def taken(self, places: int) -> list[int]:
        """Sequences of each set in the first ``places``."""
        sets, _, before = self._around(places)
        early = np.bincount(sets[:before], minlength=len(self.weights))
        return [self._first(k, places - len(self.weights)) + int(count) for k, count in enumerate(early)]

    def _turns(self, first: int) -> tuple[Int64, Int64]:
        """Sets and numbers at ``_BLOCK`` places from ``first`` on."""
        sets, numbers, before = self._around(first)
        return sets[before : before + _BLOCK], numbers[before : before + _BLOCK]

    def _around(self, first: int) -> tuple[Int64, Int64, int]:
        """(sets, numbers) of the turns around ``first`` and ``_BLOCK`` places on, and how many come before it."""
        # The time of a place differs from its number by half a turn of each set at most.
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
        """The first sequence of a set whose time is not before ``time``."""
        weight = self.weights[chosen]
        number = max(0, int(weight * time - 0.5) - 1)
        while (number + 0.5) / weight < time:
            number += 1
        return number


class SequenceOrder:
    """The sequence at each place of the endless line; sequences of all sets are numbered through."""

    def __init__(self, counts: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool) -> None:
        """Take the number of sequences of each set, above 0, and the sets' weights; the seed is of their orders."""
        self.counts, self.seed, self.shuffle = list(counts), seed, shuffle
        self.turns = MixtureSchedule(weights)
        self._starts = np.cumsum([0, *counts]).tolist()
        self._orders: dict[int, tuple[int, Int64]] = {}

    def at(self, place: int) -> int:
        """The number of the sequence at a place, counted from 0."""
        chosen, number = self.turns.at(place)
        epoch, within = divmod(number, self.counts[chosen])
        if self.shuffle:
            known = self._orders.get(chosen)
            if known is None or known[0] != epoch:
                # Raw bits of a counter-based generator, sorted: numpy's shuffles may change with its version.
                bits = np.random.Philox(key=np.array([self.seed % 2**64, (chosen << 40) + epoch], dtype=np.uint64))
                known = self._orders[chosen] = epoch, np.argsort(bits.random_raw(self.counts[chosen]), kind="stable")
            within = int(known[1][within])
        return int(self._starts[chosen]) + within

    def epochs(self, places: int) -> list[float]:
        """How many times each set is gone through in the first ``places``."""
        return [taken / count for taken, count in zip(self.turns.taken(places), self.counts, strict=True)]
