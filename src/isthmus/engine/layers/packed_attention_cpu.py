"""Causal attention over packed samples with plain matmuls, for CPUs.

Samples of similar length are stacked into one batch and cut into blocks of queries, which skip the keys above the
diagonal. The backward pass recomputes probabilities, so memory is linear in the number of tokens. PyTorch's CPU kernel
takes 1.2 to 2.6 times as long in bfloat16 (docs/decisions/0021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isthmus.engine.layers.attention_blocks import QueryBlock, SampleStack, plan_stacks
from isthmus.engine.parallel.context_parallel import Spans


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    scale: float
    repeat: int
    """Query heads per key head, adjacent in ``q``."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) before they are masked."""


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
            for block in stack.blocks:
                queries, keys = _slices(block, groups, repeat)
                scores, _ = _scores(stack_q[queries], stack_k[keys], block, options)
                probabilities, _ = _probabilities(scores, sinks)
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
            for block in stack.blocks:
                queries, keys = _slices(block, groups, repeat)
                scores, slope = _scores(stack_q[queries], stack_k[keys], block, ctx.options)
                probabilities, at_sink = _probabilities(scores, sinks)
                grad_probabilities = torch.bmm(grad_out[queries], stack_v[keys].transpose(1, 2))
                into_v[keys] += torch.bmm(probabilities.transpose(1, 2), grad_out[queries])
                if grad_sinks is not None and at_sink is not None:
                    # A sink has no value: its gradient is that of the probability it takes from the keys.
                    taken = at_sink * (probabilities * grad_probabilities).sum(-1, keepdim=True, dtype=wide)
                    grad_sinks -= taken.view(-1, groups, block.end - block.start, repeat).sum((0, 2))
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
    """
    check_shapes(q, k, lengths, spans)
    _, groups, repeat, width = q.shape
    stacks = plan_stacks(lengths, window, (groups, repeat), q.dtype, q.device, spans)
    rows = q.transpose(0, 1).reshape(groups, -1, width)
    options = ScoreOptions(width**-0.5 if scale is None else scale, repeat, softcap)
    sinks = None if sinks is None else sinks.view(groups, repeat)
    return _PackedAttention.apply(rows, k.transpose(0, 1), v.transpose(0, 1), sinks, stacks, options)
