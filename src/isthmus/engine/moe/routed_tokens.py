"""The (token, expert) pairs of a micro batch, sorted by expert."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from isthmus.engine.compiled import compiled_on_gpu
from isthmus.engine.moe.grouped_gemm import GroupSizes


def count(keys: Tensor, number: int) -> Tensor:
    """Occurrences of 0..number-1, int64 [number]; ``bincount`` would synchronize with the GPU."""
    return keys.new_zeros(number).scatter_add_(0, keys, torch.ones_like(keys))


def expert_capacity(choices: int, num_experts: int, factor: float) -> int:
    """Most tokens of an expert among ``choices`` of a rank, as in Megatron-Core."""
    return math.ceil(factor * choices / num_experts)


class _Gather(torch.autograd.Function):
    """Gathers the rows and weights of the pairs; gradients are gathered too where no pair is left out."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, routed: RoutedTokens) -> tuple[Tensor, Tensor]:
        ctx.routed, ctx.shape = routed, weights.shape
        return hidden.index_select(0, routed.tokens), weights.flatten().index_select(0, routed.order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        routed, (grad_rows, grad_weights) = ctx.routed, grads
        return routed.sum_by_token(grad_rows), routed.by_pair(grad_weights).view(ctx.shape), None


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
        self.counts: Tensor = _counts(keys, number)
        self.order: Tensor = keys.flatten().argsort(stable=True)
        self.tokens: Tensor = self.order // keys.size(1)
        self.num_tokens: int = keys.size(0)
        self.rows_of_token: Tensor | None = None
        """[T, K], the row of each pair; None if some are left out."""
        self.padding: Tensor | None = None
        """bool [n], the rows of pairs that are left out."""

    def keep_all(self) -> GroupSizes:
        """No pair is left out."""
        self.rows_of_token = _inverse(self.order).view_as(self.keys)
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
        rows, row_weights = _Gather.apply(hidden, weights, self)
        return rows, row_weights if self.padding is None else row_weights.masked_fill(self.padding, 0)

    def combine(self, rows: Tensor) -> Tensor:
        """[n, H] -> [T, H]."""
        return _Combine.apply(rows, self)

    def by_pair(self, values: Tensor) -> Tensor:
        """Values [n] of the rows as values [T K] of all pairs, 0 for those that are left out."""
        if self.rows_of_token is None:
            return values.new_zeros(self.keys.numel()).index_copy_(0, self.order, values)
        return values.index_select(0, self.rows_of_token.flatten())

    def sum_by_token(self, rows: Tensor) -> Tensor:
        if self.rows_of_token is None:
            return rows.new_zeros(self.num_tokens, rows.size(1)).index_add_(0, self.tokens, rows)
        return _sum_of_rows(self.rows_of_token, rows.unflatten(0, self.rows_of_token.shape))


@compiled_on_gpu
def _counts(keys: Tensor, number: int) -> Tensor:
    return count(keys.flatten(), number + 1)[:number]


@compiled_on_gpu
def _inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


@compiled_on_gpu
def _sum_of_rows(index: Tensor, rows: Tensor) -> Tensor:
    """For each token the sum of the rows of its pairs: ``index`` [T, K] into T K rows [T, K, H] in any order."""
    return rows.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape).sum(1)
