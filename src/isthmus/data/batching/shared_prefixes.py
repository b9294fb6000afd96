"""Samples of a packed sequence that begin with the same tokens, such as answers to one prompt.

In a causal model, hidden states of equal beginnings are equal: the layers compute them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Spans = tuple[tuple[int, int], ...]
"""Ranges [start, end) of rows."""


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Which U of the T tokens of a packed sequence the layers compute."""

    computed: Spans
    """Ranges of the packed sequence, ascending: the U rows that are computed."""
    sources: Spans
    """Ranges of the U rows, in the order of the packed sequence: the row of each of the T tokens."""
    rows: Tensor
    """int64 [T], ``sources`` by token."""

    @property
    def num_rows(self) -> int:
        """U"""
        return sum(end - start for start, end in self.computed)

    def select(self, tokens: Tensor) -> Tensor:
        """[U, ...] of [T, ...]."""
        return torch.cat([tokens[start:end] for start, end in self.computed])


def find_shared_prefixes(
    samples: Sequence[npt.NDArray[Any]],
    total: int,
    multiple: int,
    routed_experts: Sequence[npt.NDArray[Any]] | None = None,
) -> SharedPrefixes | None:
    """Compare each sample with the one before.

    Args:
        samples: input tokens [n] each, in the order of the packed sequence.
        total: T, with padding; a multiple of ``multiple``.
        multiple: of U too.
        routed_experts: [n, layers, K] each, which are equal too for tokens that are computed once; None: the routers
            choose.

    Returns:
        None if no tokens are shared.
    """
    common = [0, *(_common(before, sample) for before, sample in pairwise(samples))][: len(samples)]
    if routed_experts is not None:
        experts = [0, *(_common(before, sample) for before, sample in pairwise(routed_experts))]
        common = [min(counts) for counts in zip(common, experts, strict=False)]
    excess = sum(common) % multiple
    for number in reversed(range(len(common))):
        cut = min(excess, common[number])
        common[number] -= cut
        excess -= cut
    if not any(common):
        return None
    rows = np.empty(total, dtype=np.int64)
    is_computed = np.ones(total, dtype=np.bool_)
    start = before = computed = 0
    for sample, shared in zip(samples, common, strict=True):
        new = len(sample) - shared
        rows[start : start + shared] = rows[before : before + shared]
        rows[start + shared : start + len(sample)] = np.arange(computed, computed + new)
        is_computed[start : start + shared] = False
        before, start, computed = start, start + len(sample), computed + new
    rows[start:] = np.arange(computed, computed + total - start)
    positions = np.flatnonzero(is_computed)
    return SharedPrefixes(_ranges(positions), _ranges(rows), torch.from_numpy(rows))


def _common(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> int:
    """Number of equal first elements, or rows."""
    size = min(len(first), len(second))
    different = np.argwhere(first[:size] != second[:size])
    return int(different[0, 0]) if len(different) else size


def _ranges(numbers: npt.NDArray[np.int64]) -> Spans:
    """The ranges of consecutive numbers, in their order."""
    cuts = (np.flatnonzero(np.diff(numbers) != 1) + 1).tolist()
    return tuple((int(numbers[start]), int(numbers[end - 1]) + 1) for start, end in pairwise([0, *cuts, len(numbers)]))
