"""Token dispatchers: send tokens to the ranks of their experts and combine the results.

Experts are distributed over the ``ep`` ranks and sharded over the ``etp`` ranks, whose results are summed. Once per
layer the host reads the token counts of the other ranks to allocate memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    all_to_all,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
""":meth:`isthmus.engine.moe.moe_layer.GroupedExperts.forward`, on rows sorted by expert."""
Dispatch = Callable[[Tensor, Tensor, Tensor, Compute], Tensor]
"""(hidden [T, H], weights [T, K], chosen int64 [T, K], experts) -> [T, H]; a choice of ``num_experts`` is dropped."""


def dispatcher(
    kind: Literal["alltoall", "allgather"],
    groups: Any,
    *,
    num_experts: int,
    sequence_parallel: bool,
    dropless: bool,
) -> Dispatch:
    """``kind`` is used if experts are sharded differently from the other layers.

    ``groups`` are Megatron-Core's process groups. ``dropless``: the router drops no choice.
    """
    if groups.ep.size() == 1 and groups.expt_tp.size() == groups.tp.size():
        return _TensorParallelDispatcher(groups.tp, num_experts, sequence_parallel=sequence_parallel, dropless=dropless)
    if kind == "alltoall":
        return _AllToAllDispatcher(groups, num_experts, dropless=dropless)
    return _AllGatherDispatcher(groups, num_experts)


def count(keys: Tensor, number: int) -> Tensor:
    """Occurrences of 0..number-1, int64 [number]; ``bincount`` would synchronize with the GPU."""
    return keys.new_zeros(number).scatter_add_(0, keys, torch.ones_like(keys))


class _Gather(torch.autograd.Function):
    """Gathers rows per expert; scatter-adds gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, routed: _RoutedTokens) -> Tensor:
        ctx.routed = routed
        return hidden.index_select(0, routed.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.routed.sum_by_token(grads[0]), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, routed: _RoutedTokens) -> Tensor:
        ctx.routed = routed
        return routed.sum_by_token(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.routed.tokens), None


class _RoutedTokens:
    """The (token, expert) pairs of some experts, sorted by expert."""

    def __init__(self, keys: Tensor, number: int, *, complete: bool) -> None:
        """Sort by ``keys`` [T, K], 0..number-1; ``number`` is left out. ``complete``: no pair is left out."""
        flat = keys.flatten()
        self.counts = count(flat, number + 1)[:number]
        order = flat.argsort(stable=True)
        self.order = order if complete else order[: int(self.counts.sum())]
        self.tokens, self.num_tokens = self.order // keys.size(1), keys.size(0)
        self.rows_of_token: Tensor | None = None
        """[T, K], the row of each pair; None if some are left out."""
        if complete:
            rows = torch.arange(flat.numel(), device=flat.device)
            self.rows_of_token = torch.empty_like(order).scatter_(0, order, rows).view_as(keys)

    def gather(self, hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Sorted rows [n, H] and weights [n] of the pairs."""
        return _Gather.apply(hidden, self), weights.flatten().index_select(0, self.order)

    def combine(self, rows: Tensor) -> Tensor:
        """[n, H] -> [T, H]."""
        return _Combine.apply(rows, self)

    def sum_by_token(self, rows: Tensor) -> Tensor:
        if self.rows_of_token is None:
            return rows.new_zeros(self.num_tokens, rows.size(1)).index_add_(0, self.tokens, rows)
        return rows.index_select(0, self.rows_of_token.flatten()).unflatten(0, self.rows_of_token.shape).sum(1)


def _run_local(
    hidden: Tensor, weights: Tensor, chosen: Tensor, experts: Compute, local: range, *, complete: bool
) -> Tensor:
    """Run the experts ``local`` on tokens of this rank, last expert first."""
    number = len(local)
    keys = local.stop - 1 - chosen
    keys = torch.where((keys >= 0) & (keys < number), keys, number)
    routed = _RoutedTokens(keys, number, complete=complete)
    return routed.combine(experts(*routed.gather(hidden, weights), routed.counts))


class _TensorParallelDispatcher:
    """Experts are sharded over the tp ranks like the other layers."""

    def __init__(self, group: Any, num_experts: int, *, sequence_parallel: bool, dropless: bool) -> None:
        self.group, self.sequence_parallel, self.dropless = group, sequence_parallel, dropless
        self.local = range(num_experts)

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor, experts: Compute) -> Tensor:
        if self.sequence_parallel:
            # A rank's experts give a part of each gradient: the backward pass reduce-scatters the parts.
            hidden, weights, chosen = (_all_gather(each, self.group) for each in (hidden, weights, chosen))
            out = _run_local(hidden, weights, chosen, experts, self.local, complete=self.dropless)
            return _reduce_scatter(out, self.group)
        hidden, weights = (copy_to_tensor_model_parallel_region(each, self.group) for each in (hidden, weights))
        out = _run_local(hidden, weights, chosen, experts, self.local, complete=self.dropless)
        return reduce_from_tensor_model_parallel_region(out, self.group)


class _AllGatherDispatcher:
    """Every rank gathers the tokens of the expert group, padded to the longest, and runs its own experts."""

    def __init__(self, groups: Any, num_experts: int) -> None:
        self.group = groups.tp_ep
        number = num_experts // groups.ep.size()
        self.local = range(groups.ep.rank() * number, (groups.ep.rank() + 1) * number)
        self.dropped = num_experts

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor, experts: Compute) -> Tensor:
        tokens = hidden.size(0)
        lengths = _all_gather(torch.tensor([tokens], device=hidden.device), self.group)
        longest = max(lengths.tolist())
        hidden, weights = (_all_gather(_padded(each, longest), self.group) for each in (hidden, weights))
        chosen = _all_gather(_padded(chosen, longest, self.dropped), self.group)
        out = _run_local(hidden, weights, chosen, experts, self.local, complete=False)
        return _reduce_scatter(out, self.group)[:tokens]


class _AllToAllDispatcher:
    """Each rank sends its routed tokens to the experts' ranks with its own ``etp`` index.

    The etp ranks then gather the received tokens and reduce-scatter the results.
    """

    def __init__(self, groups: Any, num_experts: int, *, dropless: bool) -> None:
        self.ep, self.etp, self.both = groups.ep, groups.expt_tp, groups.tp_ep
        self.num_experts, self.dropless = num_experts, dropless

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor, experts: Compute) -> Tensor:
        routed = _RoutedTokens(chosen, self.num_experts, complete=self.dropless)
        # [ep, etp, ep, local experts]: rows that each rank sends to each expert; ranks are numbered etp first.
        counts = _all_gather(routed.counts, self.both).view(self.ep.size(), self.etp.size(), self.ep.size(), -1)
        on_host = counts.sum(-1).tolist()
        own = self.etp.rank()
        send = on_host[self.ep.rank()][own]
        receive = [of_source[own][self.ep.rank()] for of_source in on_host]
        received = [sum(of_source[etp][self.ep.rank()] for of_source in on_host) for etp in range(self.etp.size())]
        rows, row_weights = (
            _all_gather(_padded(all_to_all(self.ep, each, receive, send), max(received)), self.etp)
            for each in routed.gather(hidden, weights)
        )
        order, of_expert = self._sorted(counts[:, :, self.ep.rank()], received)
        results = experts(rows.index_select(0, order), row_weights.index_select(0, order), of_expert)
        out = _reduce_scatter(torch.zeros_like(rows).index_copy(0, order, results), self.etp)[: received[own]]
        return routed.combine(all_to_all(self.ep, out, send, receive))

    def _sorted(self, counts: Tensor, received: list[int]) -> tuple[Tensor, Tensor]:
        """Order that sorts the gathered rows by expert, last expert first, and the rows of each expert.

        ``counts`` int64 [ep, etp, local experts] are the rows from each rank, ``received`` the rows per etp rank.
        """
        number, longest = counts.size(2), max(received)
        by_rank = counts.transpose(0, 1).flatten(1)  # [etp, ep * local experts], in the order of the rows
        sizes = torch.cat([by_rank, longest - by_rank.sum(1, keepdim=True)], dim=1)
        keys = torch.arange(number - 1, -1, -1, device=counts.device).repeat(counts.size(0))
        keys = torch.cat([keys, keys.new_tensor([number])]).repeat(counts.size(1))
        keys = keys.repeat_interleave(sizes.flatten(), output_size=longest * len(received))
        return keys.argsort(stable=True)[: sum(received)], counts.sum((0, 1)).flip(0)


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate over the ranks; gradients are reduce-scattered."""
    return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return reduce_scatter_to_sequence_parallel_region(x, group=group)


def _padded(x: Tensor, length: int, value: float = 0) -> Tensor:
    if x.size(0) == length:
        return x
    return torch.cat([x, x.new_full((length - x.size(0), *x.shape[1:]), value)])
