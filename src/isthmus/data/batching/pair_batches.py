"""Preference pairs to micro batches; both samples of a pair are in the same micro batch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from isthmus.data.batching.batches import Batches
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.data.store.sample_store import SampleStore
from isthmus.errors import DataError


class PairBatches(Batches):
    """The micro batches of one data-parallel rank; samples 2k and 2k + 1 of store and micro batch are a pair.

    A sequence is a pair. With ``packing`` all micro batches of a step, over all ranks, have about the same length; else
    each has ``micro_batch_size`` pairs.
    """

    reference: torch.Tensor | None = None
    """float64 [samples of the store], log-probabilities under the reference model."""

    def _sequences(self, first: int, end: int) -> list[list[int]]:
        groups = self.store.groups[first:end] if isinstance(self.store, SampleStore) else np.arange(end - first)
        if len(groups) % 2 or bool(np.any(groups[::2] != groups[1::2])):
            raise DataError("the samples are not pairs of answers, one after the other. Prepare them as preferences.")
        return [[chosen, chosen + 1] for chosen in range(first, end, 2)]

    def _distribute(self, sequences: list[list[int]]) -> list[PackedBatch]:
        if not self.settings.packing:
            return super()._distribute(sequences)
        sizes = [int(self._inputs[pair].sum()) for pair in sequences]
        micro_batches = balance(sizes, self._rounds(len(sequences)) * self.shard.dp_size)
        own = micro_batches[self.shard.dp_rank :: self.shard.dp_size]
        return [self._pack([sample for k in pairs for sample in sequences[k]]) for pairs in own]

    def _pack(self, samples: list[int]) -> PackedBatch:
        batch = super()._pack(samples)
        return batch if self.reference is None else replace(batch, reference_logps=self.reference[samples])


def balance(sizes: Sequence[int], num_bins: int) -> list[list[int]]:
    """Distribute items over bins of about equal total size: the largest first, each into the smallest bin.

    Deterministic; the items of a bin are in ascending order.
    """
    totals = [(0, number) for number in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        total, number = totals[0]
        bins[number].append(item)
        heapq.heapreplace(totals, (total + sizes[item], number))
    return [sorted(items) for items in bins]
