"""Groups of Mamba-2 heads on tensor-parallel ranks: each rank has whole groups, or several ranks share a group.

Ranks that share a group have some heads of it each, and some of its channels of B and C, which all of these heads use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The groups of heads that this rank has a part of; their number divides that of the ranks, or is a multiple."""

    number: int
    """Groups of all ranks."""
    tp_group: Any

    @property
    def local_number(self) -> int:
        """Groups of this rank, of which it may have only a part."""
        return max(1, self.number // self.tp_group.size())

    @property
    def sharing(self) -> int:
        """Ranks that share a group."""
        return max(1, self.tp_group.size() // self.number)

    def keys(self, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """B and C of this rank's groups, [T, G, N] each, from this rank's channels of them.

        Their gradients are sums over the ranks that share a group.
        """
        if self.sharing == 1:
            return b.unflatten(-1, (self.local_number, -1)), c.unflatten(-1, (self.local_number, -1))
        # Megatron-Core gathers over all ranks: with one group, as in published models, these are the ranks that share.
        all_ranks = all_gather_last_dim_from_tensor_parallel_region(torch.cat((b, c), dim=-1), group=self.tp_group)
        channels = all_ranks.unflatten(-1, (self.number, self.sharing, 2, -1))[:, self._group()]
        first, second = channels.transpose(1, 2).flatten(2).unsqueeze(2).unbind(1)
        return first, second

    def summed(self, values: Tensor) -> Tensor:
        """Sums of ``values`` [T, 1] over the ranks that share this rank's group; so are their gradients."""
        if self.sharing == 1:
            return values
        columns = torch.nn.functional.pad(values, (self._group(), self.number - 1 - self._group()))
        columns = reduce_from_tensor_model_parallel_region(columns, group=self.tp_group)
        columns = copy_to_tensor_model_parallel_region(columns, group=self.tp_group)
        return columns[:, self._group(), None]

    def _group(self) -> int:
        """The only group that this rank has a part of."""
        return int(self.tp_group.rank()) // self.sharing
