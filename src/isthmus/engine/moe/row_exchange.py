"""The exchange of routed tokens with the ranks of their experts, by one all-to-all each way.

A row travels with the bits of its weight, so that nothing is rounded. Both are exchanged as bytes, which no collective
can sum: gradients are summed over the ``etp`` ranks before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from isthmus.engine.moe.routed_tokens import RoutedTokens

_ALIGNED_BYTES = 16
"""Rows begin at multiples of it, as kernels need that copy so many bytes at a time."""


class RowExchange:
    """Sends the routed tokens of a micro batch to their experts' ranks, and the results back.

    The ``etp`` ranks gather the rows that they received, padded to the longest, and reduce-scatter the results.
    """

    def __init__(self, routed: RoutedTokens, counts: Tensor, rows: list[list[list[int]]], ep: Any, etp: Any) -> None:
        """``counts`` int64 [ep, etp, ep, local experts]: rows that each rank sends to each expert; ``rows`` are those
        that it sends to each rank.
        """
        self.routed, self.ep, self.etp = routed, ep, etp
        ep_rank, etp_rank = ep.rank(), etp.rank()
        self.send: list[int] = rows[ep_rank][etp_rank]
        self.receive: list[int] = [rows_of_source[etp_rank][ep_rank] for rows_of_source in rows]
        received = [sum(rows_of_source[rank][ep_rank] for rows_of_source in rows) for rank in range(etp.size())]
        self.received, self.longest = received[etp_rank], max(received)
        self.order = _order(counts[:, :, ep_rank], received)
        """Sorts the gathered rows by expert, last expert first."""

    def dispatch(self, hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [n, H] and weights [n] of this rank's experts, of ``hidden`` [T, H] and ``weights`` [T, K]."""
        rows, row_weights = _SendRows.apply(hidden, weights, self)
        return rows, row_weights

    def combine(self, results: Tensor) -> Tensor:
        """Sums [T, H] of the results [n, H]."""
        return _ReturnResults.apply(results, self)  # type: ignore[no-any-return]

    def to_experts(self, x: Tensor) -> Tensor:
        """Exchange and gather rows [sent, ...]."""
        received = all_to_all(self.ep, x, self.receive, self.send)
        return all_gather(padded(received, self.longest), self.etp)

    def to_sources(self, x: Tensor) -> Tensor:
        """Exchange rows [received, ...] in the other direction."""
        return all_to_all(self.ep, x, self.send, self.receive)  # type: ignore[no-any-return]

    def sum_received(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Sum rows [n, ...], sorted by expert, over the etp ranks: rows [received, ...] in the order of arrival."""
        if self.etp.size() == 1:
            return (torch.empty_like(x) if out is None else out).index_copy_(0, self.order, x)
        gathered = x.new_zeros(self.longest * self.etp.size(), *x.shape[1:]).index_copy_(0, self.order, x)
        total = reduce_scatter(gathered, self.etp)[: self.received]
        return total if out is None else out.copy_(total)


@dataclass(frozen=True, slots=True)
class _RowFormat:
    """The bytes of a row: its elements, its weight, and padding."""

    width: int
    dtype: torch.dtype
    weight_dtype: torch.dtype

    def empty(self, number: int, device: torch.device) -> Tensor:
        """uint8 [number, bytes]"""
        size = _rounded_up(self._weight_start + self.weight_dtype.itemsize, _ALIGNED_BYTES)
        return torch.empty(number, size, dtype=torch.uint8, device=device)

    def views(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """The rows [n, H] and weights [n] in a buffer."""
        start = self._weight_start
        rows = buffer[:, : self.width * self.dtype.itemsize].view(self.dtype)
        weights = buffer[:, start : start + self.weight_dtype.itemsize].view(self.weight_dtype)
        return rows, weights.squeeze(1)

    @property
    def _weight_start(self) -> int:
        return _rounded_up(self.width * self.dtype.itemsize, self.weight_dtype.itemsize)


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, exchange: RowExchange) -> tuple[Tensor, Tensor]:
        ctx.exchange, ctx.shape = exchange, weights.shape
        ctx.row_format = row_format = _RowFormat(hidden.size(1), hidden.dtype, weights.dtype)
        routed = exchange.routed
        sent = row_format.empty(routed.order.numel(), hidden.device)
        rows, row_weights = row_format.views(sent)
        torch.index_select(hidden, 0, routed.tokens, out=rows)
        torch.index_select(weights.flatten(), 0, routed.order, out=row_weights)
        rows, row_weights = row_format.views(exchange.to_experts(sent))
        return rows.index_select(0, exchange.order), row_weights.index_select(0, exchange.order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        exchange, row_format = ctx.exchange, ctx.row_format
        received = row_format.empty(exchange.received, grads[0].device)
        for grad, view in zip(grads, row_format.views(received), strict=True):
            exchange.sum_received(grad, out=view)
        rows, row_weights = row_format.views(exchange.to_sources(received))
        routed: RoutedTokens = exchange.routed
        return routed.sum_by_token(rows), routed.by_pair(row_weights).view(ctx.shape), None


class _ReturnResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, results: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.routed.sum_by_token(exchange.to_sources(exchange.sum_received(results)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        exchange: RowExchange = ctx.exchange
        sent = grads[0].index_select(0, exchange.routed.tokens)
        return exchange.to_experts(sent).index_select(0, exchange.order), None


def _order(counts: Tensor, received: list[int]) -> Tensor:
    """Order that sorts the gathered rows by expert, last expert first.

    ``counts`` int64 [ep, etp, local experts] are the rows from each rank, ``received`` the rows per etp rank.
    """
    number, longest = counts.size(2), max(received)
    by_rank = counts.transpose(0, 1).flatten(1)  # [etp, ep * local experts], in the order of the rows
    sizes = torch.cat([by_rank, longest - by_rank.sum(1, keepdim=True)], dim=1)
    keys = torch.arange(number - 1, -1, -1, device=counts.device).repeat(counts.size(0))
    keys = torch.cat([keys, keys.new_full((1,), number)]).repeat(counts.size(1))
    keys = keys.repeat_interleave(sizes.flatten(), output_size=longest * len(received))
    return keys.argsort(stable=True)[: sum(received)]


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate over the ranks; gradients are reduce-scattered."""
    return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return reduce_scatter_to_sequence_parallel_region(x, group=group)


def padded(x: Tensor, length: int, value: float = 0) -> Tensor:
    if x.size(0) == length:
        return x
    return torch.cat([x, x.new_full((length - x.size(0), *x.shape[1:]), value)])


def _rounded_up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple
