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


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [start, end) of the line and the keys [first, end) that they may see."""

    start: int
    end: int
    first: int
    mask: Tensor
    """0 where a query sees a key and -inf elsewhere, [(end - start) * repeat, end - first]."""


@functools.lru_cache(maxsize=2)  # the layers of a step share them, forward and backward
def blocks_of(lengths: tuple[int, ...], window: int | None, repeat: int, dtype: torch.dtype) -> tuple[Block, ...]:
    """Cut a line of samples into blocks of queries, wherever the samples begin and end.

    Args:
        lengths: tokens of each sample.
        window: keys that a query sees, itself included; None for all before it in its sample.
        repeat: query heads that share a key head; each row of a mask is there as many times.
        dtype: of the masks.
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
        blocks.append(Block(start, end, first, mask.repeat_interleave(repeat, 0)))
    return tuple(blocks)


def _probabilities(q: Tensor, k: Tensor, block: Block, repeat: int) -> Tensor:
    """[G, queries * repeat, keys] of one block."""
    rows = q[:, block.start * repeat : block.end * repeat]
    keys = k[:, block.first : block.end].transpose(1, 2)
    scores = torch.baddbmm(block.mask, rows, keys, alpha=q.size(2) ** -0.5)
    return torch.softmax(scores, -1, out=scores)


class _LineAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: tuple[Block, ...]) -> Tensor:
        groups, tokens, width = v.shape
        repeat = q.size(1) // tokens
        out = q.new_empty(tokens, groups, repeat, width)
        for block in blocks:
            probabilities = _probabilities(q, k, block, repeat)
            attended = torch.bmm(probabilities, v[:, block.first : block.end])
            out[block.start : block.end] = attended.view(groups, -1, repeat, width).transpose(0, 1)
        ctx.save_for_backward(q, k, v)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        groups, tokens, width = v.shape
        repeat, scale = q.size(1) // tokens, q.size(2) ** -0.5
        grad = grads[0].transpose(0, 1).reshape(groups, -1, width)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), k.new_zeros(v.shape)
        for block in ctx.blocks:
            queries = slice(block.start * repeat, block.end * repeat)
            keys = slice(block.first, block.end)
            probabilities = _probabilities(q, k, block, repeat)
            grad_probabilities = torch.bmm(grad[:, queries], v[:, keys].transpose(1, 2))
            grad_v[:, keys] += torch.bmm(probabilities.transpose(1, 2), grad[:, queries])
            grad_scores = torch._softmax_backward_data(grad_probabilities, probabilities, -1, probabilities.dtype)
            torch.mul(torch.bmm(grad_scores, k[:, keys]), scale, out=grad_q[:, queries])
            grad_k[:, keys].add_(torch.bmm(grad_scores.transpose(1, 2), q[:, queries]), alpha=scale)
        return grad_q, grad_k, grad_v, None


def line_attention(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], window: int | None = None) -> Tensor:
    """Attend causally within each sample of a line.

    Args:
        q: [T, G, R, D], R query heads to each key head. No key is copied for them, and nothing at all where q and k lie
            in memory with the groups outermost, as :func:`isthmus.engine.rope.rotate` leaves them.
        k: [T, G, D].
        v: [T, G, Dv].
        lengths: tokens of each sample; they sum to T.
        window: keys that a query sees, itself included; None for all before it in its sample.

    Returns:
        [T, G, R, Dv]

    Raises:
        ValueError: the samples are not the line.
    """
    if sum(lengths) != q.size(0):
        raise ValueError(f"the samples have {sum(lengths)} tokens and the line has {q.size(0)}")
    _, groups, repeat, width = q.shape
    blocks = blocks_of(lengths, window, repeat, q.dtype)
    rows = q.transpose(0, 1).reshape(groups, -1, width)
    return _LineAttention.apply(rows, k.transpose(0, 1), v.transpose(0, 1), blocks)
