"""Causal attention over a packed line in plain matrix products, for CPUs.

The line is cut into blocks of queries. A block is multiplied with the keys from the start of its first sample to its
own end, so the work follows the triangle below the diagonal, and several short samples share one product.
Probabilities exist for one block at a time and the backward pass takes them again, and masks only where there is
something to hide: memory grows with the line and not with its square.
torch's own kernel for CPUs takes one sample at a time and 1.3 to 2 times as long (docs/decisions/0009).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isthmus.engine.context import Spans

QUERIES = 96
"""Tokens of a block; measured best of 64 to 256, together for float32 and bfloat16."""
KEYS = 64
"""The keys of a block come in multiples of it: oneDNN compiles a kernel for each shape, at 2 ms and half a MiB."""


_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Block:
    """Some queries that follow one another in the line, and the keys [first, last) of it that they may see."""

    start: int
    end: int
    """Queries [start, end) of those that are given."""
    first: int
    last: int
    left: Tensor
    """0 where a query sees one of the first keys and -inf elsewhere, [(end - start) * repeat, keys]."""
    right: Tensor
    """The same of the last keys. Those between are seen by all queries."""


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores become probabilities."""

    scale: float
    """What the product of a query and a key is multiplied by."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) before they are masked."""


@functools.lru_cache(maxsize=2)  # the layers of a step share them, forward and backward
def blocks_of(
    lengths: tuple[int, ...],
    window: int | None,
    repeat: int,
    dtype: torch.dtype,
    device: torch.device = _CPU,
    spans: Spans | None = None,
) -> tuple[Block, ...]:
    """Cut a line of samples into blocks of queries, wherever the samples begin and end.

    Args:
        lengths: tokens of each sample.
        window: keys that a query sees, itself included; None for all before it in its sample.
        repeat: query heads that share a key head; each row of a mask is there as many times.
        dtype: of the masks.
        device: of the masks.
        spans: where in the line the queries are; None: everywhere.
    """
    starts = torch.tensor((0, *lengths)).cumsum(0)
    sample_start = torch.repeat_interleave(starts[:-1], torch.tensor(lengths, dtype=torch.int64))
    tokens = int(starts[-1])
    index = torch.arange(tokens)
    oldest = sample_start if window is None else torch.maximum(sample_start, index - window + 1)

    def mask(start: int, end: int, first: int, last: int) -> Tensor:
        keys, queries = index[first:last], index[start:end, None]
        seen = (keys <= queries) & (keys >= oldest[start:end, None])
        values = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)
        return values.repeat_interleave(repeat, 0).to(device)

    blocks = []
    given = 0
    for span_start, span_end in ((0, tokens),) if spans is None else spans:
        for start in range(span_start, span_end, QUERIES):
            end = min(start + QUERIES, span_end)
            first = max(0, end - math.ceil((end - int(oldest[start])) / KEYS) * KEYS)
            hidden = min(int(oldest[end - 1]), start), start  # no key between is hidden from any query
            if hidden[1] - hidden[0] < (end - first) // 2:
                hidden = end, end  # so few that one mask for all, added by the product itself, is faster
            left, right = mask(start, end, first, hidden[0]), mask(start, end, hidden[1], end)
            blocks.append(Block(given, given + end - start, first, end, left, right))
            given += end - start
    return tuple(blocks)


def _scores(q: Tensor, k: Tensor, block: Block, repeat: int, how: Scores) -> tuple[Tensor, Tensor | None]:
    """[G, queries * repeat, keys] of one block, masked; and the slope of the cap at each of them, if there is one."""
    rows = q[:, block.start * repeat : block.end * repeat]
    keys = k[:, block.first : block.last].transpose(1, 2)
    slope = None
    if how.softcap is None:
        if block.left.size(1) == keys.size(2):
            return torch.baddbmm(block.left, rows, keys, alpha=how.scale), None
        scores = torch.baddbmm(q.new_empty(1, 1, 1), rows, keys, beta=0, alpha=how.scale)
    else:
        share = torch.bmm(rows, keys).mul_(how.scale / how.softcap).tanh_()
        slope = 1 - share.square()
        scores = share.mul_(how.softcap)
    scores[..., : block.left.size(1)] += block.left
    scores[..., scores.size(2) - block.right.size(1) :] += block.right
    return scores, slope


def _probabilities(scores: Tensor, sinks: Tensor | None, repeat: int) -> tuple[Tensor, Tensor | None]:
    """What each key gets, and what the sink of the row gets, [G, rows, 1]; ``sinks`` is [G, repeat]."""
    if sinks is None:
        return torch.softmax(scores, -1, out=scores), None
    groups, rows, keys = scores.shape
    column = sinks[:, None].expand(groups, rows // repeat, repeat).reshape(groups, rows, 1)
    both = torch.cat((scores, column.to(scores.dtype)), -1)
    return torch.softmax(both, -1, out=both).split((keys, 1), -1)  # type: ignore[return-value]


class _LineAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, blocks: tuple[Block, ...], how: Scores
    ) -> Tensor:
        groups, _, width = v.shape
        tokens = blocks[-1].end
        repeat = q.size(1) // tokens
        out = q.new_empty(tokens, groups, repeat, width)
        for block in blocks:
            scores, _ = _scores(q, k, block, repeat, how)
            probabilities, _ = _probabilities(scores, sinks, repeat)
            attended = torch.bmm(probabilities, v[:, block.first : block.last])
            out[block.start : block.end] = attended.view(groups, -1, repeat, width).transpose(0, 1)
        ctx.save_for_backward(q, k, v, sinks)
        ctx.blocks, ctx.how = blocks, how
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks = ctx.saved_tensors
        groups, _, width = v.shape
        repeat, scale = q.size(1) // ctx.blocks[-1].end, ctx.how.scale
        grad = grads[0].transpose(0, 1).reshape(groups, -1, width)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), k.new_zeros(v.shape)
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_sinks = None if sinks is None else torch.zeros(sinks.shape, dtype=wide, device=sinks.device)
        for block in ctx.blocks:
            queries = slice(block.start * repeat, block.end * repeat)
            keys = slice(block.first, block.last)
            scores, slope = _scores(q, k, block, repeat, ctx.how)
            probabilities, at_sink = _probabilities(scores, sinks, repeat)
            grad_probabilities = torch.bmm(grad[:, queries], v[:, keys].transpose(1, 2))
            grad_v[:, keys] += torch.bmm(probabilities.transpose(1, 2), grad[:, queries])
            if grad_sinks is not None and at_sink is not None:
                # The sink has no value, so all it does is take from the others.
                taken = at_sink * (probabilities * grad_probabilities).sum(-1, keepdim=True, dtype=wide)
                grad_sinks -= taken.view(groups, -1, repeat).sum(1)
            grad_scores = torch._softmax_backward_data(grad_probabilities, probabilities, -1, probabilities.dtype)
            if slope is not None:
                grad_scores = grad_scores * slope
            torch.mul(torch.bmm(grad_scores, k[:, keys]), scale, out=grad_q[:, queries])
            grad_k[:, keys].add_(torch.bmm(grad_scores.transpose(1, 2), q[:, queries]), alpha=scale)
        return grad_q, grad_k, grad_v, None if grad_sinks is None else grad_sinks.to(sinks.dtype), None, None


def check_line(q: Tensor, k: Tensor, lengths: tuple[int, ...], spans: Spans | None) -> None:
    """Raise ValueError unless ``k`` has a row for each token of the samples, and ``q`` one for each in the spans."""
    queries = sum(lengths) if spans is None else sum(end - start for start, end in spans)
    if (q.size(0), k.size(0)) != (queries, sum(lengths)):
        raise ValueError(
            f"the samples have {sum(lengths)} tokens, {queries} of them ask, and the line has {k.size(0)} keys and "
            f"{q.size(0)} queries"
        )


def line_attention(
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
    """Attend causally within each sample of a line.

    Args:
        q: [T, G, R, D], R query heads to each key head. No key is copied for them, and nothing at all where q and k lie
            in memory with the groups outermost, as :func:`isthmus.engine.rope.rotate` leaves them.
        k: [T, G, D].
        v: [T, G, Dv].
        lengths: tokens of each sample; they sum to T.
        window: keys that a query sees, itself included; None for all before it in its sample.
        scale: what the product of a query and a key is multiplied by; None is one over the root of their width.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: [G * R], for each query head a logit that takes part in its softmax and has no value.
        spans: where in the line the queries are, which then are as many as these cover; None: everywhere.

    Returns:
        As many rows as queries: [T, G, R, Dv]

    Raises:
        ValueError: the samples are not the line, or the queries not those of the spans.
    """
    check_line(q, k, lengths, spans)
    _, groups, repeat, width = q.shape
    blocks = blocks_of(lengths, window, repeat, q.dtype, q.device, spans)
    rows = q.transpose(0, 1).reshape(groups, -1, width)
    how = Scores(width**-0.5 if scale is None else scale, softcap)
    sinks = None if sinks is None else sinks.view(groups, repeat)
    return _LineAttention.apply(rows, k.transpose(0, 1), v.transpose(0, 1), sinks, blocks, how)
