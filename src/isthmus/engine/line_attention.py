"""Causal attention over a packed line in plain matrix products, for CPUs.

The line is cut into blocks of queries. A block is multiplied with the keys from the start of its first sample to its
own end, so the work follows the triangle below the diagonal, and several short samples share one product.
Probabilities exist for one block at a time and the backward pass takes them again: memory grows with the line and not
with its square.
torch's own kernel for CPUs takes one sample at a time and 1.3 to 2 times as long (docs/decisions/0009).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

QUERIES = 96
"""Tokens of a block; measured best of 64 to 256, together for float32 and bfloat16."""
KEYS = 64
"""The keys of a block come in multiples of it: oneDNN compiles a kernel for each shape, at 2 ms and half a MiB."""


_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [start, end) of the line and the keys [first, end) that they may see."""

    start: int
    end: int
    first: int
    mask: Tensor
    """0 where a query sees a key and -inf elsewhere, [(end - start) * repeat, end - first]."""


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores become probabilities."""

    scale: float
    """What the product of a query and a key is multiplied by."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) before they are masked."""


@functools.lru_cache(maxsize=2)  # the layers of a step share them, forward and backward
def blocks_of(
    lengths: tuple[int, ...], window: int | None, repeat: int, dtype: torch.dtype, device: torch.device = _CPU
) -> tuple[Block, ...]:
    """Cut a line of samples into blocks of queries, wherever the samples begin and end.

    Args:
        lengths: tokens of each sample.
        window: keys that a query sees, itself included; None for all before it in its sample.
        repeat: query heads that share a key head; each row of a mask is there as many times.
        dtype: of the masks.
        device: of the masks.
    """
    starts = torch.tensor((0, *lengths)).cumsum(0)
    sample_start = torch.repeat_interleave(starts[:-1], torch.tensor(lengths, dtype=torch.int64))
    tokens = int(starts[-1])
    index = torch.arange(tokens)
    oldest = sample_start if window is None else torch.maximum(sample_start, index - window + 1)
    blocks = []
    for start in range(0, tokens, QUERIES):
        end = min(start + QUERIES, tokens)
        first = max(0, end - math.ceil((end - int(oldest[start])) / KEYS) * KEYS)
        keys, queries = index[first:end], index[start:end, None]
        seen = (keys <= queries) & (keys >= oldest[start:end, None])
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)
        blocks.append(Block(start, end, first, mask.repeat_interleave(repeat, 0).to(device)))
    return tuple(blocks)


def _scores(q: Tensor, k: Tensor, block: Block, repeat: int, how: Scores) -> tuple[Tensor, Tensor | None]:
    """[G, queries * repeat, keys] of one block, masked; and the slope of the cap at each of them, if there is one."""
    rows = q[:, block.start * repeat : block.end * repeat]
    keys = k[:, block.first : block.end].transpose(1, 2)
    if how.softcap is None:
        return torch.baddbmm(block.mask, rows, keys, alpha=how.scale), None
    share = torch.bmm(rows, keys).mul_(how.scale / how.softcap).tanh_()
    slope = 1 - share.square()
    return share.mul_(how.softcap).add_(block.mask), slope


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
        groups, tokens, width = v.shape
        repeat = q.size(1) // tokens
        out = q.new_empty(tokens, groups, repeat, width)
        for block in blocks:
            scores, _ = _scores(q, k, block, repeat, how)
            probabilities, _ = _probabilities(scores, sinks, repeat)
            attended = torch.bmm(probabilities, v[:, block.first : block.end])
            out[block.start : block.end] = attended.view(groups, -1, repeat, width).transpose(0, 1)
        ctx.save_for_backward(q, k, v, sinks)
        ctx.blocks, ctx.how = blocks, how
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks = ctx.saved_tensors
        groups, tokens, width = v.shape
        repeat, scale = q.size(1) // tokens, ctx.how.scale
        grad = grads[0].transpose(0, 1).reshape(groups, -1, width)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), k.new_zeros(v.shape)
        grad_sinks = None if sinks is None else torch.zeros(sinks.shape, dtype=torch.float32, device=sinks.device)
        for block in ctx.blocks:
            queries = slice(block.start * repeat, block.end * repeat)
            keys = slice(block.first, block.end)
            scores, slope = _scores(q, k, block, repeat, ctx.how)
            probabilities, at_sink = _probabilities(scores, sinks, repeat)
            grad_probabilities = torch.bmm(grad[:, queries], v[:, keys].transpose(1, 2))
            grad_v[:, keys] += torch.bmm(probabilities.transpose(1, 2), grad[:, queries])
            if grad_sinks is not None and at_sink is not None:
                # The sink has no value, so all it does is take from the others.
                taken = at_sink * (probabilities * grad_probabilities).sum(-1, keepdim=True, dtype=torch.float32)
                grad_sinks -= taken.view(groups, -1, repeat).sum(1)
            grad_scores = torch._softmax_backward_data(grad_probabilities, probabilities, -1, probabilities.dtype)
            if slope is not None:
                grad_scores = grad_scores * slope
            torch.mul(torch.bmm(grad_scores, k[:, keys]), scale, out=grad_q[:, queries])
            grad_k[:, keys].add_(torch.bmm(grad_scores.transpose(1, 2), q[:, queries]), alpha=scale)
        return grad_q, grad_k, grad_v, None if grad_sinks is None else grad_sinks.to(sinks.dtype), None, None


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

    Returns:
        [T, G, R, Dv]

    Raises:
        ValueError: the samples are not the line.
    """
    if sum(lengths) != q.size(0):
        raise ValueError(f"the samples have {sum(lengths)} tokens and the line has {q.size(0)}")
    _, groups, repeat, width = q.shape
    blocks = blocks_of(lengths, window, repeat, q.dtype, q.device)
    rows = q.transpose(0, 1).reshape(groups, -1, width)
    how = Scores(width**-0.5 if scale is None else scale, softcap)
    sinks = None if sinks is None else sinks.view(groups, repeat)
    return _LineAttention.apply(rows, k.transpose(0, 1), v.transpose(0, 1), sinks, blocks, how)
