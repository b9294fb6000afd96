"""Causal attention over packed samples with plain matmuls, for CPUs.

Samples of similar length are stacked into one batch and cut into blocks of queries, which skip the keys above the
diagonal. The backward pass recomputes probabilities, so memory is linear in the number of tokens. PyTorch's CPU kernel
takes 1.2 to 2.6 times as long in bfloat16 (docs/decisions/0021).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from isthmus.engine.layers.dropout import AttentionDropout, drop, keep_mask
from isthmus.engine.parallel.context_parallel import Spans

BLOCK_QUERIES = 96
"""Fastest of 64 to 256 in float32 and bfloat16."""
KEYS_MULTIPLE = 64
"""If a block does not start at its samples' first key, its number of keys is a multiple of this: oneDNN compiles a
kernel per shape (2 ms, 0.5 MiB)."""
ROWS_MULTIPLE = {torch.bfloat16: 32}
"""Stacked samples are padded to a multiple of this, for the same reason."""
MAX_STACKED = {torch.float32: 256}
"""Longer samples are not stacked: MKL is as fast without the copies."""
MAX_SCORES = 3 << 18
"""Scores of stacked samples at a time, so that they fit the cache."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class QueryRange:
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """A range of queries of several samples, and the keys that they attend to."""

    top: int
    bottom: int
    """Samples [top, bottom) of the stack."""
    start: int
    end: int
    """Queries [start, end) of each sample."""
    first: int
    last: int
    """Keys [first, last), from the start of the samples, or of the sequence for a range in place."""
    left: Tensor
    """Additive mask of the first keys (0 or -inf), [(end - start) * repeat, keys]."""
    right: Tensor
    """Mask of the last keys. Keys between the two masks are not masked."""


@dataclass(frozen=True, slots=True)
class SampleStack:
    """Samples of similar length as one batch, the longest first; or one range of queries in place."""

    ranges: tuple[QueryRange, ...]
    rows: int
    """Padded tokens per sample; 0 for a range in place."""
    blocks: tuple[QueryBlock, ...]

    def queries(self, sequence: Tensor, repeat: int) -> Tensor:
        """[G, T * repeat, D] -> [samples * G, rows * repeat, D]; a view for a range in place."""
        if not self.rows:
            (part,) = self.ranges
            return sequence[:, part.start * repeat : (part.start + part.length) * repeat]
        return self._stacked(sequence, repeat)

    def keys(self, sequence: Tensor) -> Tensor:
        """[G, T, D] -> [samples * G, rows, D]; the whole sequence for a range in place."""
        return self._stacked(sequence, 1) if self.rows else sequence

    def _stacked(self, sequence: Tensor, repeat: int) -> Tensor:
        groups, _, width = sequence.shape
        size = self.rows * repeat
        if sequence.size(1) == len(self.ranges) * size and all(part.length == self.rows for part in self.ranges):
            return sequence.unflatten(1, (-1, size)).transpose(0, 1).reshape(-1, size, width)
        stacked = sequence.new_zeros(len(self.ranges), groups, size, width)
        for target, part in zip(stacked, self.ranges, strict=True):
            rows = slice(part.start * repeat, (part.start + part.length) * repeat)
            target[:, : part.length * repeat] = sequence[:, rows]
        return stacked.flatten(0, 1)

    def unstack(self, stacked: Tensor, sequence: Tensor, repeat: int) -> None:
        """Copy ``stacked`` back into ``sequence``; a no-op for a range in place."""
        if self.rows:
            for part, rows in zip(self.ranges, stacked.unflatten(0, (len(self.ranges), -1)), strict=True):
                target = slice(part.start * repeat, (part.start + part.length) * repeat)
                sequence[:, target] = rows[:, : part.length * repeat]


@functools.lru_cache(maxsize=2)  # shared by the layers of a step, forward and backward
def plan_stacks(
    lengths: tuple[int, ...],
    window: int | None,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device = _CPU,
    spans: Spans | None = None,
) -> tuple[SampleStack, ...]:
    """Stack samples and cut the stacks into blocks of queries.

    ``window`` includes the query's own key. ``heads`` is (key heads, query heads per key head); ``spans`` are the
    queries' positions in the sequence, None: all.
    """
    cut = functools.partial(_cut, window=window, heads=heads, dtype=dtype, device=device)
    ends = torch.tensor(lengths).cumsum(0)
    positions = torch.arange(int(ends[-1]))
    sample_starts = (ends - torch.tensor(lengths)).repeat_interleave(torch.tensor(lengths))

    def in_place(start: int, end: int, offset: int) -> SampleStack:
        blocks = cut((end - start,), positions[start:end], sample_starts[start:end])
        return SampleStack((QueryRange(offset, end - start),), 0, blocks)

    if spans is not None:
        offsets = accumulate((end - start for start, end in spans), initial=0)
        return tuple(in_place(start, end, offset) for (start, end), offset in zip(spans, offsets, strict=False))
    multiple = ROWS_MULTIPLE.get(dtype, 1)
    waiting = [QueryRange(int(end) - length, length) for length, end in zip(lengths, ends, strict=True)]
    waiting.sort(key=lambda part: -part.length)
    stacks = []
    while waiting:
        longest = waiting[0].length
        similar = [part for part in waiting if 2 * part.length >= longest]
        if longest > MAX_STACKED.get(dtype, longest):
            similar = similar[:1]
        waiting = waiting[len(similar) :]
        if len(similar) == 1 and (longest % multiple == 0 or len(lengths) == 1):
            start = similar[0].start
            stacks.append(in_place(start, start + longest, start))
        else:
            rows = positions[: math.ceil(longest / multiple) * multiple]
            blocks = cut([part.length for part in similar], rows, torch.zeros_like(rows))
            stacks.append(SampleStack(tuple(similar), len(rows), blocks))
    return tuple(stacks)


def _cut(
    queries: Sequence[int],
    positions: Tensor,
    sample_starts: Tensor,
    *,
    window: int | None,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[QueryBlock, ...]:
    """Cut a stack into blocks; ``queries`` are the numbers of queries per sample, in descending order.

    For each query ``own`` is the key at its position and ``sample_starts`` the first key of its sample, both int64.
    """
    groups, repeat = heads
    oldest = sample_starts if window is None else torch.maximum(sample_starts, positions - window + 1)
    blocks = []
    for start in range(0, len(positions), BLOCK_QUERIES):
        end = min(start + BLOCK_QUERIES, len(positions))
        last = int(positions[end - 1]) + 1
        first = max(0, last - math.ceil((last - int(oldest[start])) / KEYS_MULTIPLE) * KEYS_MULTIPLE)
        # All queries attend to the keys between.
        unmasked = min(int(oldest[end - 1]), int(positions[start])), int(positions[start])
        if unmasked[1] - unmasked[0] < (last - first) // 2:
            unmasked = last, last  # so few that one mask for all keys, added by the matmul itself, is faster
        masks = []
        for keys in (torch.arange(first, unmasked[0]), torch.arange(unmasked[1], last)):
            seen = (keys <= positions[start:end, None]) & (keys >= oldest[start:end, None])
            values = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)
            masks.append(values.repeat_interleave(repeat, 0).to(device))
        number = sum(length > start for length in queries)
        at_once = max(1, MAX_SCORES // (groups * repeat * (end - start) * (last - first)))
        for top in range(0, number, at_once):
            blocks.append(QueryBlock(top, min(top + at_once, number), start, end, first, last, *masks))
    return tuple(blocks)


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    scale: float
    repeat: int
    """Query heads per key head, adjacent in ``q``."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) before they are masked."""
    dropout: AttentionDropout | None = None


def _scores(q: Tensor, k: Tensor, block: QueryBlock, options: ScoreOptions) -> tuple[Tensor, Tensor | None]:
    """Masked scores [B, queries * repeat, keys] of one block, and the derivative of the soft cap, if there is one."""
    keys = k.transpose(1, 2)
    slope = None
    if options.softcap is None:
        if block.left.size(1) == keys.size(2):
            return torch.baddbmm(block.left, q, keys, alpha=options.scale), None
        scores = torch.baddbmm(q.new_empty(1, 1, 1), q, keys, beta=0, alpha=options.scale)
    else:
        share = torch.bmm(q, keys).mul_(options.scale / options.softcap).tanh_()
        slope = 1 - share.square()
        scores = share.mul_(options.softcap)
    scores[..., : block.left.size(1)] += block.left
    scores[..., scores.size(2) - block.right.size(1) :] += block.right
    return scores, slope


def _probabilities(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Probabilities of the keys, and of the sink of each row, [B, rows, 1]; ``sinks`` is [G, repeat]."""
    if sinks is None:
        return torch.softmax(scores, -1, out=scores), None
    groups, repeat = sinks.shape
    batch, rows, keys = scores.shape
    column = sinks[None, :, None].expand(batch // groups, groups, rows // repeat, repeat).reshape(batch, rows, 1)
    both = torch.cat((scores, column.to(scores.dtype)), -1)
    return torch.softmax(both, -1, out=both).split((keys, 1), -1)  # type: ignore[return-value]


def _dropout_masks(
    stack: SampleStack, groups: int, options: ScoreOptions
) -> Callable[[tuple[slice, slice], tuple[slice, slice]], Tensor | None]:
    """Computes the mask [B, queries * repeat, keys] of one block of the stack, None without dropout."""
    if (dropout := options.dropout) is None:
        return lambda _queries, _keys: None
    rows = stack.queries(dropout.query_keys(groups, options.repeat), options.repeat)
    columns = stack.keys(dropout.key_keys(groups)).transpose(1, 2)
    return lambda queries, keys: keep_mask(rows[queries], columns[keys[0], :, keys[1]], dropout.rate)


def _dropped(values: Tensor, mask: Tensor | None, options: ScoreOptions) -> Tensor:
    return values if mask is None or options.dropout is None else drop(values, mask, options.dropout.rate)


def _slices(block: QueryBlock, groups: int, repeat: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    heads = slice(block.top * groups, block.bottom * groups)
    return (heads, slice(block.start * repeat, block.end * repeat)), (heads, slice(block.first, block.last))


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        stacks: tuple[SampleStack, ...],
        options: ScoreOptions,
    ) -> Tensor:
        groups, width, repeat = v.size(0), v.size(2), options.repeat
        out = q.new_empty(groups, q.size(1), width)
        for stack in stacks:
            stack_q, stack_k, stack_v = stack.queries(q, repeat), stack.keys(k), stack.keys(v)
            stack_out = stack_q.new_empty(*stack_q.shape[:2], width) if stack.rows else stack.queries(out, repeat)
            mask_of = _dropout_masks(stack, groups, options)
            for block in stack.blocks:
                queries, keys = _slices(block, groups, repeat)
                scores, _ = _scores(stack_q[queries], stack_k[keys], block, options)
                probabilities, _ = _probabilities(scores, sinks)
                probabilities = _dropped(probabilities, mask_of(queries, keys), options)
                stack_out[queries] = torch.bmm(probabilities, stack_v[keys])
            stack.unstack(stack_out, out, repeat)
        ctx.save_for_backward(q, k, v, sinks)
        ctx.stacks, ctx.options = stacks, options
        return out.unflatten(1, (-1, repeat)).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks = ctx.saved_tensors
        groups, width = v.size(0), v.size(2)
        repeat, scale = ctx.options.repeat, ctx.options.scale
        grad = grads[0].transpose(0, 1).reshape(groups, -1, width)
        grad_q, grad_k, grad_v = torch.empty_like(q), k.new_zeros(k.shape), v.new_zeros(v.shape)
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_sinks = None if sinks is None else torch.zeros(sinks.shape, dtype=wide, device=sinks.device)
        for stack in ctx.stacks:
            stack_q, stack_k, stack_v = stack.queries(q, repeat), stack.keys(k), stack.keys(v)
            grad_out = stack.queries(grad, repeat)
            into_q, into_k, into_v = (
                (torch.empty_like(stack_q), torch.zeros_like(stack_k), torch.zeros_like(stack_v))
                if stack.rows
                else (stack.queries(grad_q, repeat), grad_k, grad_v)
            )
            mask_of = _dropout_masks(stack, groups, ctx.options)
            for block in stack.blocks:
                queries, keys = _slices(block, groups, repeat)
                scores, slope = _scores(stack_q[queries], stack_k[keys], block, ctx.options)
                probabilities, at_sink = _probabilities(scores, sinks)
                grad_probabilities = torch.bmm(grad_out[queries], stack_v[keys].transpose(1, 2))
                mask = mask_of(queries, keys)
                into_v[keys] += torch.bmm(_dropped(probabilities, mask, ctx.options).transpose(1, 2), grad_out[queries])
                grad_probabilities = _dropped(grad_probabilities, mask, ctx.options)
                if grad_sinks is not None and at_sink is not None:
                    # A sink has no value: its gradient is that of the probability it takes from the keys.
                    sink_grad = at_sink * (probabilities * grad_probabilities).sum(-1, keepdim=True, dtype=wide)
                    grad_sinks -= sink_grad.view(-1, groups, block.end - block.start, repeat).sum((0, 2))
                grad_scores = torch._softmax_backward_data(grad_probabilities, probabilities, -1, probabilities.dtype)
                if slope is not None:
                    grad_scores = grad_scores * slope
                torch.mul(torch.bmm(grad_scores, stack_k[keys]), scale, out=into_q[queries])
                into_k[keys].add_(torch.bmm(grad_scores.transpose(1, 2), stack_q[queries]), alpha=scale)
            stack.unstack(into_q, grad_q, repeat)
            stack.unstack(into_k, grad_k, 1)
            stack.unstack(into_v, grad_v, 1)
        return grad_q, grad_k, grad_v, None if grad_sinks is None else grad_sinks.to(sinks.dtype), None, None


def check_shapes(q: Tensor, k: Tensor, lengths: tuple[int, ...], spans: Spans | None) -> None:
    """Raise ValueError unless ``k`` has a row for each token of the samples and ``q`` one for each in the spans."""
    queries = sum(lengths) if spans is None else sum(end - start for start, end in spans)
    if (q.size(0), k.size(0)) != (queries, sum(lengths)):
        raise ValueError(
            f"expected {queries} queries and {sum(lengths)} keys for these sample lengths, "
            f"got {q.size(0)} queries and {k.size(0)} keys"
        )


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    window: int | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    spans: Spans | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """Attend causally within each sample; returns [T, G, R, Dv], one row per query.

    Args:
        q: [T, G, R, D], R query heads per key head; unstacked samples are not copied if G is outermost in memory.
        k: [T, G, D].
        v: [T, G, Dv].
        lengths: tokens of each sample; their sum is T.
        window: keys that a query attends to, including its own; None: all earlier keys of its sample.
        scale: factor of the scores; None: ``D**-0.5``.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: [G * R], a logit per query head in the softmax denominator.
        spans: positions of the queries in the sequence; None: all.
        dropout: of the probabilities, after the softmax.
    """
    check_shapes(q, k, lengths, spans)
    _, groups, repeat, width = q.shape
    stacks = plan_stacks(lengths, window, (groups, repeat), q.dtype, q.device, spans)
    rows = q.transpose(0, 1).reshape(groups, -1, width)
    options = ScoreOptions(width**-0.5 if scale is None else scale, repeat, softcap, dropout)
    sinks = None if sinks is None else sinks.view(groups, repeat)
    return _PackedAttention.apply(rows, k.transpose(0, 1), v.transpose(0, 1), sinks, stacks, options)
