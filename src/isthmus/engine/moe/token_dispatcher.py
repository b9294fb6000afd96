"""How tokens reach the experts that they chose, on this rank or on others, and how what is made of them comes back.

Every rank of a stage has tokens of its own, cut by data, context and sequence parallelism. The experts are spread over
the ``ep`` ranks, and each is cut over the ``etp`` ranks, whose results are added up. The host learns the numbers of
tokens that other ranks send, once a layer, because memory for them is laid out there.
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
"""What experts make of rows sorted by expert: :meth:`isthmus.engine.moe.experts.Experts.forward`."""
Dispatch = Callable[[Tensor, Tensor, Tensor, Compute], Tensor]
"""(hidden [T, H], weights [T, K], chosen int64 [T, K], experts) -> [T, H]; ``num_experts`` chosen means none."""


def dispatcher(
    kind: Literal["alltoall", "allgather"],
    groups: Any,
    *,
    num_experts: int,
    sequence_parallel: bool,
    dropless: bool,
) -> Dispatch:
    """The way for this layout.

    Args:
        kind: for experts that are spread otherwise than the matrices of the other layers.
        groups: Megatron-Core's, of experts and of tensor parallelism.
        num_experts: in the whole layer.
        sequence_parallel: whether tp ranks have tokens of their own.
        dropless: whether every choice is one of an expert.
    """
    if groups.ep.size() == 1 and groups.expt_tp.size() == groups.tp.size():
        return _OverTensorParallel(groups.tp, num_experts, sequence_parallel=sequence_parallel, dropless=dropless)
    return _AllToAll(groups, num_experts, dropless=dropless) if kind == "alltoall" else _AllGather(groups, num_experts)


def count(keys: Tensor, number: int) -> Tensor:
    """How often each of 0..number-1 occurs, int64 [number]; ``bincount`` would make the host wait for a GPU."""
    return keys.new_zeros(number).scatter_add_(0, keys, torch.ones_like(keys))


class _Copied(torch.autograd.Function):
    """Rows for visits; their gradients are added up at home, always in the same order."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, tokens: Tensor, home: Tensor | None) -> Tensor:
        ctx.save_for_backward(tokens, home)
        ctx.num_tokens = hidden.size(0)
        return hidden.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        tokens, home = ctx.saved_tensors
        return _at_home(grads[0], tokens, home, ctx.num_tokens), None, None


class _Summed(torch.autograd.Function):
    """What the visits of each token made, added up."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, tokens: Tensor, home: Tensor | None, num_tokens: int) -> Tensor:
        ctx.save_for_backward(tokens)
        return _at_home(rows, tokens, home, num_tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (tokens,) = ctx.saved_tensors
        return grads[0].index_select(0, tokens), None, None, None


def _at_home(rows: Tensor, tokens: Tensor, home: Tensor | None, num_tokens: int) -> Tensor:
    if home is None:
        return rows.new_zeros(num_tokens, rows.size(1)).index_add_(0, tokens, rows)
    return rows.index_select(0, home.flatten()).unflatten(0, home.shape).sum(1)


class _Visits:
    """The visits of tokens to some of the experts, sorted by expert."""

    def __init__(self, keys: Tensor, number: int, *, complete: bool) -> None:
        """Sort.

        Args:
            keys: int64 [T, K]; 0..number-1 are experts in the order that is wanted, ``number`` is left out.
            number: of experts.
            complete: whether none is left out; else the device is asked how many there are.
        """
        flat = keys.flatten()
        self.counts = count(flat, number + 1)[:number]
        order = flat.argsort(stable=True)
        self.order = order if complete else order[: int(self.counts.sum())]
        self.tokens, self.num_tokens = self.order // keys.size(1), keys.size(0)
        self.home: Tensor | None = None
        """[T, K], where each visit lies; None if some are left out."""
        if complete:
            places = torch.arange(flat.numel(), device=flat.device)
            self.home = torch.empty_like(order).scatter_(0, order, places).view_as(keys)

    def take(self, hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The rows [n, H] and weights [n] of the visits, sorted."""
        return _Copied.apply(hidden, self.tokens, self.home), weights.flatten().index_select(0, self.order)

    def bring(self, rows: Tensor) -> Tensor:
        """[n, H] -> [T, H]."""
        summed: Tensor = _Summed.apply(rows, self.tokens, self.home, self.num_tokens)
        return summed


def _visit(hidden: Tensor, weights: Tensor, chosen: Tensor, experts: Compute, held: range, *, complete: bool) -> Tensor:
    """What the experts whose numbers are ``held`` make of tokens that are all here; the last expert comes first."""
    number = len(held)
    keys = held.stop - 1 - chosen
    keys = torch.where((keys >= 0) & (keys < number), keys, number)
    visits = _Visits(keys, number, complete=complete)
    return visits.bring(experts(*visits.take(hidden, weights), visits.counts))


class _OverTensorParallel:
    """Experts cut over the tensor-parallel ranks as all else is: each rank's part of each expert sees all tokens."""

    def __init__(self, group: Any, num_experts: int, *, sequence_parallel: bool, dropless: bool) -> None:
        self.group, self.sequence_parallel, self.dropless = group, sequence_parallel, dropless
        self.held = range(num_experts)

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor, experts: Compute) -> Tensor:
        if self.sequence_parallel:
            # A rank's experts give a part of each gradient: on the way back the parts are added and shared out.
            hidden, weights, chosen = (_gathered(each, self.group) for each in (hidden, weights, chosen))
            return _shared_out(_visit(hidden, weights, chosen, experts, self.held, complete=self.dropless), self.group)
        hidden, weights = (copy_to_tensor_model_parallel_region(each, self.group) for each in (hidden, weights))
        out = _visit(hidden, weights, chosen, experts, self.held, complete=self.dropless)
        return reduce_from_tensor_model_parallel_region(out, self.group)  # type: ignore[no-any-return]


class _AllGather:
    """Every rank sees the tokens of all ranks that its experts are shared with, and computes what concerns its own.

    Lines differ in length, so they are padded to the longest.
    """

    def __init__(self, groups: Any, num_experts: int) -> None:
        self.group = groups.tp_ep
        number = num_experts // groups.ep.size()
        self.held = range(groups.ep.rank() * number, (groups.ep.rank() + 1) * number)
        self.none = num_experts

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor, experts: Compute) -> Tensor:
        tokens = hidden.size(0)
        lengths = _gathered(torch.tensor([tokens], device=hidden.device), self.group)
        longest = max(lengths.tolist())
        hidden, weights = (_gathered(_padded(each, longest), self.group) for each in (hidden, weights))
        chosen = _gathered(_padded(chosen, longest, self.none), self.group)
        out = _visit(hidden, weights, chosen, experts, self.held, complete=False)
        return _shared_out(out, self.group)[:tokens]


class _AllToAll:
    """Each rank sends every visit to the one rank of its own ``etp`` place that has the expert.

    Where experts are cut, these ranks then gather what came and share the sums out.
    """

    def __init__(self, groups: Any, num_experts: int, *, dropless: bool) -> None:
        self.ep, self.etp, self.both = groups.ep, groups.expt_tp, groups.tp_ep
        self.num_experts, self.dropless = num_experts, dropless

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor, experts: Compute) -> Tensor:
        visits = _Visits(chosen, self.num_experts, complete=self.dropless)
        # [ep, etp, ep, local experts]: what each rank sends to which expert; ranks are numbered etp first.
        counts = _gathered(visits.counts, self.both).view(self.ep.size(), self.etp.size(), self.ep.size(), -1)
        on_host = counts.sum(-1).tolist()
        mine = self.etp.rank()
        send = on_host[self.ep.rank()][mine]
        receive = [of_sender[mine][self.ep.rank()] for of_sender in on_host]
        arrived = [sum(of_sender[place][self.ep.rank()] for of_sender in on_host) for place in range(self.etp.size())]
        rows, shares = (
            _gathered(_padded(all_to_all(self.ep, each, receive, send), max(arrived)), self.etp)
            for each in visits.take(hidden, weights)
        )
        order, of_expert = self._sorted(counts[:, :, self.ep.rank()], arrived)
        made = experts(rows.index_select(0, order), shares.index_select(0, order), of_expert)
        out = _shared_out(torch.zeros_like(rows).index_copy(0, order, made), self.etp)[: arrived[mine]]
        return visits.bring(all_to_all(self.ep, out, send, receive))

    def _sorted(self, counts: Tensor, arrived: list[int]) -> tuple[Tensor, Tensor]:
        """Where each expert's rows lie among those gathered, the last expert's first, and how many there are of each.

        Args:
            counts: int64 [ep, etp, local experts], what came from each rank.
            arrived: rows at each etp place; they are padded to the most.
        """
        number, longest = counts.size(2), max(arrived)
        by_place = counts.transpose(0, 1).flatten(1)  # [etp, ep * local experts], as they lie
        sizes = torch.cat([by_place, longest - by_place.sum(1, keepdim=True)], dim=1)
        keys = torch.arange(number - 1, -1, -1, device=counts.device).repeat(counts.size(0))
        keys = torch.cat([keys, keys.new_tensor([number])]).repeat(counts.size(1))
        keys = keys.repeat_interleave(sizes.flatten(), output_size=longest * len(arrived))
        return keys.argsort(stable=True)[: sum(arrived)], counts.sum((0, 1)).flip(0)


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Of all ranks, one behind the other; gradients are added and shared out."""
    return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)  # type: ignore[no-any-return]


def _shared_out(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over all ranks, of which each keeps its own part."""
    return reduce_scatter_to_sequence_parallel_region(x, group=group)  # type: ignore[no-any-return]


def _padded(x: Tensor, length: int, value: float = 0) -> Tensor:
    """``x`` [n, ...] -> [length, ...]."""
    if x.size(0) == length:
        return x
    return torch.cat([x, x.new_full((length - x.size(0), *x.shape[1:]), value)])
