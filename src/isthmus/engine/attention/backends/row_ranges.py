"""Queries of a packed sequence, the keys that they attend to, and views of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isthmus.engine.parallel.context_parallel import Spans


class Segment(NamedTuple):
    """Queries [start, end) of one sample, which attend to keys [first, end); positions in the packed sequence."""

    start: int
    end: int
    first: int


def segments(lengths: tuple[int, ...], window: int | None, spans: Spans | None) -> Iterator[list[Segment]]:
    """For each span of queries, its samples or parts of them. The keys of a span are adjacent rows."""
    ends = list(accumulate(lengths))
    for span_start, span_end in ((0, ends[-1]),) if spans is None else spans:
        sample_segments = []
        for length, sample_end in zip(lengths, ends, strict=True):
            sample = sample_end - length
            start, end = max(sample, span_start), min(sample_end, span_end)
            if start < end:
                sample_segments.append(
                    Segment(start, end, sample if window is None else max(sample, start - window + 1))
                )
        yield sample_segments


def offset_ranges(sizes: Iterable[int]) -> Spans:
    """Adjacent ranges of these sizes, from 0."""
    return tuple(pairwise(accumulate(sizes, initial=0)))


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
