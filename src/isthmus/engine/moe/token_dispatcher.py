"""Token dispatchers: send tokens to the ranks of their experts and combine the results.

Experts are distributed over the ``ep`` ranks and sharded over the ``etp`` ranks, whose results are summed. To allocate
memory, the host reads the token counts of the other ranks: once per layer with ``alltoall``, twice with ``allgather``,
and not at all if each rank has all experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from isthmus.engine.host_copies import HostCopy
from isthmus.engine.moe.grouped_gemm import GroupSizes
from isthmus.engine.moe.routed_tokens import RoutedTokens, expert_capacity
from isthmus.engine.moe.row_exchange import RowExchange, all_gather, padded, reduce_scatter

Compute = Callable[[Tensor, Tensor, GroupSizes], Tensor]
""":meth:`isthmus.engine.moe.moe_layer.GroupedExperts.forward`, on rows sorted by expert."""
Overlap = Callable[[], object]
"""Starts work on a GPU that does not depend on the dispatcher; called before the host waits for the GPU."""
Dispatch = Callable[[Tensor, Tensor, Tensor, Compute, Overlap], Tensor]
"""(hidden [T, H], weights [T, K], chosen int64 [T, K], experts, overlap) -> [T, H]; ``num_experts`` is dropped."""
Keep = Callable[[RoutedTokens], GroupSizes]
"""One of the ``keep`` methods of :class:`RoutedTokens`."""


def dispatcher(
    kind: Literal["alltoall", "allgather"],
    groups: Any,
    *,
    num_experts: int,
    sequence_parallel: bool,
    capacity_factor: float | None,
) -> Dispatch:
    """``kind`` is used if experts are sharded differently from the other layers.

    ``groups`` are Megatron-Core's process groups. ``capacity_factor`` is that of the router; None: no choice is
    dropped.
    """
    if groups.ep.size() == 1 and groups.expt_tp.size() == groups.tp.size():
        return _TensorParallelDispatcher(groups.tp, num_experts, sequence_parallel, capacity_factor)
    if kind == "alltoall":
        return _AllToAllDispatcher(groups, num_experts, dropless=capacity_factor is None)
    return _AllGatherDispatcher(groups, num_experts)


class _TensorParallelDispatcher:
    """Experts are sharded over the tp ranks like the other layers."""

    def __init__(self, group: Any, num_experts: int, sequence_parallel: bool, capacity_factor: float | None) -> None:
        self.group, self.sequence_parallel, self.capacity_factor = group, sequence_parallel, capacity_factor
        self.num_experts = num_experts

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor, experts: Compute, _overlap: Overlap) -> Tensor:
        if self.sequence_parallel:
            # A rank's experts give a part of each gradient: the backward pass reduce-scatters the parts.
            hidden, weights, chosen = (all_gather(x, self.group) for x in (hidden, weights, chosen))
            return reduce_scatter(self._run(hidden, weights, chosen, experts), self.group)
        hidden, weights = (copy_to_tensor_model_parallel_region(x, self.group) for x in (hidden, weights))
        return reduce_from_tensor_model_parallel_region(self._run(hidden, weights, chosen, experts), self.group)

    def _run(self, hidden: Tensor, weights: Tensor, chosen: Tensor, experts: Compute) -> Tensor:
        keep: Keep = RoutedTokens.keep_all
        if self.capacity_factor is not None:
            ranks = self.group.size() if self.sequence_parallel else 1  # each drops tokens beyond its own capacity
            capacity = expert_capacity(chosen.numel() // ranks, self.num_experts, self.capacity_factor)
            rows = ranks * self.num_experts * capacity
            keep = (lambda routed: routed.keep_at_most(rows)) if hidden.is_cuda else RoutedTokens.keep_counted
        return run_local(hidden, weights, chosen, experts, range(self.num_experts), keep)


def run_local(
    hidden: Tensor,
    weights: Tensor,
    chosen: Tensor,
    experts: Compute,
    local: range,
    keep: Keep,
) -> Tensor:
    """Run the experts ``local`` on tokens of this rank, last expert first."""
    keys = local.stop - 1 - chosen
    if keep is not RoutedTokens.keep_all:  # others are left out
        keys = torch.where((keys >= 0) & (keys < len(local)), keys, len(local))
    routed = RoutedTokens(keys, len(local))
    sizes = keep(routed)
    return routed.combine(experts(*routed.gather(hidden, weights), sizes))


class _AllGatherDispatcher:
    """Every rank gathers the tokens of the expert group, padded to the longest, and runs its own experts."""

    def __init__(self, groups: Any, num_experts: int) -> None:
        self.group = groups.tp_ep
        number = num_experts // groups.ep.size()
        self.local = range(groups.ep.rank() * number, (groups.ep.rank() + 1) * number)
        self.dropped = num_experts

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor, experts: Compute, overlap: Overlap) -> Tensor:
        tokens = hidden.size(0)
        lengths = HostCopy(all_gather(torch.full((1,), tokens, device=hidden.device), self.group))
        if hidden.is_cuda:
            overlap()
        longest = max(lengths.read().tolist())
        hidden, weights = (all_gather(padded(x, longest), self.group) for x in (hidden, weights))
        chosen = all_gather(padded(chosen, longest, self.dropped), self.group)
        out = run_local(hidden, weights, chosen, experts, self.local, RoutedTokens.keep_counted)
        return reduce_scatter(out, self.group)[:tokens]


class _AllToAllDispatcher:
    """Each rank sends its routed tokens to the experts' ranks with its own ``etp`` index.

    The etp ranks then gather the received tokens and reduce-scatter the results.
    """

    def __init__(self, groups: Any, num_experts: int, *, dropless: bool) -> None:
        self.ep, self.etp, self.both = groups.ep, groups.expt_tp, groups.tp_ep
        self.num_experts, self.dropless = num_experts, dropless

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor, experts: Compute, overlap: Overlap) -> Tensor:
        routed = RoutedTokens(chosen, self.num_experts)
        # [ep, etp, ep, local experts]: rows that each rank sends to each expert; ranks are numbered etp first.
        counts = all_gather(routed.counts, self.both).view(self.ep.size(), self.etp.size(), self.ep.size(), -1)
        copy = HostCopy(counts)
        if self.dropless:
            routed.keep_all()
        if hidden.is_cuda:
            overlap()
        per_expert = copy.read()
        exchange = RowExchange(routed, counts, per_expert.sum(-1).tolist(), self.ep, self.etp)
        if not self.dropless:
            routed.keep(sum(exchange.send))
        sizes = [x[:, :, self.ep.rank()].sum((0, 1)).flip(0) for x in (counts, per_expert)]
        group_sizes = GroupSizes(sizes[0], sizes[1].tolist())
        return exchange.combine(experts(*exchange.dispatch(hidden, weights), group_sizes))
