"""The (token, expert) pairs of a micro batch, sorted by expert."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from isthmus.engine.moe.grouped_gemm import GroupSizes


def count(keys: Tensor, number: int) -> Tensor:
    """Occurrences of 0..number-1, int64 [number]; ``bincount`` would synchronize with the GPU."""
    return keys.new_zeros(number).scatter_add_(0, keys, torch.ones_like(keys))


def expert_capacity(choices: int, num_experts: int, factor: float) -> int:
    """Most tokens of an expert among ``choices`` of a rank, as in Megatron-Core."""
    return math.ceil(factor * choices / num_experts)


class _Gather(torch.autograd.Function):
    """Gathers rows per expert; scatter-adds gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, routed: RoutedTokens) -> Tensor:
        ctx.routed = routed
        return hidden.index_select(0, routed.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.routed.sum_by_token(grads[0]), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, routed: RoutedTokens) -> Tensor:
        ctx.routed = routed
        return routed.sum_by_token(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.routed.tokens), None


class RoutedTokens:
    """The (token, expert) pairs of some experts, sorted by expert; pairs that are left out come last."""

    def __init__(self, keys: Tensor, number: int) -> None:
        """Sort by ``keys`` [T, K], 0..number-1; ``number`` is left out. One of the ``keep`` methods follows."""
        self.keys = keys
        self.counts = count(keys.flatten(), number + 1)[:number]
        self.order = keys.flatten().argsort(stable=True)
        self.tokens, self.num_tokens = self.order // keys.size(1), keys.size(0)
        self.rows_of_token: Tensor | None = None
        """[T, K], the row of each pair; None if some are left out."""
        self.padding: Tensor | None = None
        """bool [n], the rows of pairs that are left out."""

    def keep_all(self) -> GroupSizes:
        """No pair is left out."""
        rows = torch.arange(self.order.numel(), device=self.order.device)
        self.rows_of_token = torch.empty_like(self.order).scatter_(0, self.order, rows).view_as(self.keys)
        return GroupSizes(self.counts)

    def keep(self, rows: int) -> None:
        """``rows`` pairs are not left out."""
        self.order, self.tokens = self.order[:rows], self.tokens[:rows]

    def keep_counted(self) -> GroupSizes:
        """The host reads how many pairs are not left out."""
        sizes = GroupSizes(self.counts)
        self.keep(sum(sizes.on_host))
        return sizes

    def keep_at_most(self, rows: int) -> GroupSizes:
        """The host knows an upper bound: the last expert gets pairs that are left out as padding, with weight 0."""
        self.keep(min(rows, self.order.numel()))
        others = self.counts[:-1]
        self.padding = self.keys.flatten()[self.order] == self.counts.numel()
        return GroupSizes(torch.cat([others, self.order.numel() - others.sum(0, keepdim=True)]))

    def gather(self, hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Sorted rows [n, H] and weights [n] of the pairs."""
        row_weights = weights.flatten().index_select(0, self.order)
        return _Gather.apply(hidden, self), row_weights if self.padding is None else row_weights.masked_fill(
            self.padding, 0
        )

    def combine(self, rows: Tensor) -> Tensor:
        """[n, H] -> [T, H]."""
        return _Combine.apply(rows, self)

    def sum_by_token(self, rows: Tensor) -> Tensor:
        if self.rows_of_token is None:
            return rows.new_zeros(self.num_tokens, rows.size(1)).index_add_(0, self.tokens, rows)
        return rows.index_select(0, self.rows_of_token.flatten()).unflatten(0, self.rows_of_token.shape).sum(1)
