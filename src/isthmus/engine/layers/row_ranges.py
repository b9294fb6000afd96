"""Ranges of the rows of a tensor, and tokens that layers compute once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isthmus.data.batching.shared_prefixes import SharedPrefixes, Spans


def all_tokens(x: Tensor, shared: SharedPrefixes | None) -> Tensor:
    """[T, ...] of the rows [U, ...] that layers compute."""
    return x if shared is None else torch.cat(row_ranges(x, shared.sources))


def computed_rows(x: Tensor, shared: SharedPrefixes | None) -> Tensor:
    """[U, ...] of [T, ...], whose values are equal where tokens are shared."""
    return x if shared is None else torch.cat(row_ranges(x, shared.computed))


def row_ranges(x: Tensor, ranges: Spans) -> tuple[Tensor, ...]:
    """Views of the rows [start, end) of ``x``. The backward pass is linear in the rows of the ranges.

    Slices would each allocate a gradient of the size of ``x``.
    """
    if ranges == ((0, x.size(0)),):
        return (x,)
    if [start for start, _ in ranges] + [x.size(0)] == [0] + [end for _, end in ranges]:
        return tuple(x.split([end - start for start, end in ranges]))
    views: tuple[Tensor, ...] = _RowRanges.apply(x, ranges)
    return views


class _RowRanges(torch.autograd.Function):
    """Ranges that overlap or leave rows out: their gradients are added up in one buffer, at least float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranges: Spans) -> tuple[Tensor, ...]:
        ctx.shape, ctx.dtype, ctx.ranges = x.shape, x.dtype, ranges
        return tuple(x[start:end] for start, end in ranges)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].new_zeros(ctx.shape, dtype=torch.promote_types(ctx.dtype, torch.float32))
        for (start, end), grad in zip(ctx.ranges, grads, strict=True):
            total[start:end] += grad
        return total.to(ctx.dtype), None
