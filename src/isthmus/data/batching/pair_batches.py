"""Pairs to micro batches: both samples of a pair lie on one line, and a step takes a number of pairs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from isthmus.data.batching.batches import Batches, MicroBatch
from isthmus.data.store.sample_store import SampleStore
from isthmus.data.store.samples import Samples
from isthmus.errors import DataError


@dataclass(frozen=True, slots=True)
class PairLine(MicroBatch):
    """A line of pairs: segments 2k and 2k + 1 are the chosen and the rejected answer of its k-th pair."""

    samples: torch.Tensor
    """int64 [num_samples], which samples of the store these are."""
    reference: torch.Tensor | None
    """float64 [num_samples], the log-probability of each answer under the reference; None before it is known."""


class PairBatches(Batches):
    """The micro batches of one data-parallel rank, of a store whose samples 2k and 2k + 1 are a pair.

    A sequence is a pair here. With ``packing`` the pairs of a step are dealt out so that all its lines, those of other
    ranks included, are about equally long; else a line has ``micro_batch_size`` of them, in their order.
    """

    reference: torch.Tensor | None = None
    """float64 [samples of the store], for the lines to have a part of; see :attr:`PairLine.reference`."""

    def __init__(self, store: Samples, *, packing: bool, **settings: Any) -> None:
        """As the parent's.

        Raises:
            DataError: the samples are no pairs.
        """
        groups = store.groups if isinstance(store, SampleStore) else np.arange(len(store))
        if len(groups) % 2 or bool(np.any(groups[::2] != groups[1::2])):
            raise DataError("the samples are no pairs of answers, two after the other. Prepare them as preferences.")
        self.balanced = packing
        super().__init__(store, packing=False, **settings)

    def _set(self, first: int, end: int, packing: bool) -> list[list[int]]:
        return [[chosen, chosen + 1] for chosen in range(first, end, 2)]

    def _deal(self, sequences: list[list[int]]) -> list[MicroBatch]:
        if not self.balanced:
            return super()._deal(sequences)
        at_once = self.micro_batch_size * self.dp_size * self.micro_batches_multiple_of
        rounds = -(-len(sequences) // at_once) * self.micro_batches_multiple_of
        lines = spread([int(self._inputs[pair].sum()) for pair in sequences], rounds * self.dp_size)
        own = lines[self.dp_rank :: self.dp_size]
        return [self._join([sample for k in line for sample in sequences[k]]) for line in own]

    def _join(self, samples: list[int]) -> MicroBatch:
        line = super()._join(samples)
        numbers = torch.tensor(samples, dtype=torch.int64)
        reference = None if self.reference is None else self.reference[numbers]
        return PairLine(
            **{field.name: getattr(line, field.name) for field in fields(line)}, samples=numbers, reference=reference
        )


def spread(sizes: Sequence[int], lines: int) -> list[list[int]]:
    """Deal items to lines of about equal length: the longest first, each to the line that is shortest so far.

    The result is a function of the arguments alone; items of a line are in the order of their numbers.
    """
    loads = [(0, line) for line in range(lines)]
    dealt: list[list[int]] = [[] for _ in range(lines)]
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        load, line = loads[0]
        dealt[line].append(item)
        heapq.heapreplace(loads, (load + sizes[item], line))
    return [sorted(line) for line in dealt]
