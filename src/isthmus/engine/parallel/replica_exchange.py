"""Exchange of what the ranks of a replica of the model have of its tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

_ALIGNMENT = 8
"""Bytes: parts begin where elements of any dtype may begin."""


def replica_group(*, experts: bool) -> dist.ProcessGroup:
    """The ranks that have all tensors of a replica together: tp x pp, or etp x ep x pp those of its experts."""
    group: dist.ProcessGroup
    if experts:
        group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    else:
        group = parallel_state.get_model_parallel_group()
    return group


class PartExchange:
    """Broadcasts the part of each rank to the others of a group, or sends them to its first rank.

    Each exchange uses the same memory: set the part of this rank in :meth:`parts`, then :meth:`run`.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, first_only: bool = False) -> None:
        """``first_only``: the first rank of the group gets the parts; the others get none."""
        self.group = group
        self.first_only = first_only
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._parts: list[Tensor] = []

    def parts(self, sizes: Sequence[int]) -> list[Tensor]:
        """Memory for the part of each rank, uint8 of ``sizes``; of ranks whose part this one does not get, empty."""
        rank = self.group.rank()
        sizes = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        if self.first_only and rank:
            sizes = [size if other == rank else 0 for other, size in enumerate(sizes)]
        if self._memory.numel() < sum(sizes):
            self._memory = self._memory.new_empty(sum(sizes))
        self._parts = list(self._memory[: sum(sizes)].split(sizes))
        return self._parts

    def run(self) -> bool:
        """Exchange the parts, a collective of the group; whether this rank gets them."""
        if self.first_only:
            return self._to_first()
        ranks = dist.get_process_group_ranks(self.group)
        pairs = [(rank, part) for rank, part in zip(ranks, self._parts, strict=True) if len(part)]
        for work in [dist.broadcast(part, src=rank, group=self.group, async_op=True) for rank, part in pairs]:
            work.wait()
        return True

    def _to_first(self) -> bool:
        sizes = [len(part) for part in self._parts]
        local = sizes[0] if self.group.rank() == 0 else 0  # it does not send to itself
        used = sum(sizes)
        received, sent = self._memory[local:used], self._memory[:used]
        if self.group.rank():
            splits = [0] * len(sizes), [used, *[0] * (len(sizes) - 1)]
            dist.all_to_all_single(received[:0], sent, *splits, group=self.group)
            return False
        splits = [0, *sizes[1:]], [0] * len(sizes)
        dist.all_to_all_single(received, sent[:0], *splits, group=self.group)
        return True
