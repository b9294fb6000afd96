"""Causal attention over a packed line in plain matrix products, for CPUs.

Samples of like length are laid one above the other, so that one product serves them all, and cut into blocks of
queries. A block is multiplied with the keys from the start of its samples to its own end, so the work follows the
triangle below the diagonal. Probabilities exist for some blocks at a time and the backward pass takes them again, and
masks only where there is something to hide: memory grows with the line and not with its square.
torch's own kernel for CPUs takes one sample at a time, in bfloat16 1.2 to 2.6 times as long (docs/decisions/0021).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from isthmus.engine.parallel.context_parallel import Spans

QUERIES = 96
"""Tokens of a block; measured best of 64 to 256, together for float32 and bfloat16."""
KEYS = 64
"""Where a block does not see its samples from their start, its keys come in multiples of it: oneDNN compiles a kernel
for each shape, at 2 ms and half a MiB."""
FILL = {torch.bfloat16: 32}
"""Samples that lie above one another are filled up to a multiple of it, for the same reason."""
HIGHEST = {torch.float32: 256}
"""Longer samples stay where they are: for them MKL is as fast one by one, and nothing is copied."""
SCORES = 3 << 18
"""The most scores of several samples at a time: what fits the cache."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries that follow one another, among those that are given."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Block:
    """Some queries that follow one another in each of some pieces, and the keys that they may see."""

    top: int
    bottom: int
    """Pieces [top, bottom) of the stack."""
    start: int
    end: int
    """Queries [start, end) of each."""
    first: int
    last: int
    """Keys [first, last), counted from the start of the pieces, or of the line where a stretch is left in it."""
    left: Tensor
    """0 where a query sees one of the first keys and -inf elsewhere, [(end - start) * repeat, keys]."""
    right: Tensor
    """The same of the last keys. Those between are seen by all queries."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Whole samples of like length one above the other, the longest on top; or one stretch, left where it is."""

    pieces: tuple[Piece, ...]
    rows: int
    """Tokens that each piece has, filled up with zeros; 0 where one stretch is left where it is."""
    blocks: tuple[Block, ...]

    def queries(self, line: Tensor, repeat: int) -> Tensor:
        """[G, T * repeat, D] -> [pieces * G, rows * repeat, D]; a view of a stretch that is left where it is."""
        if not self.rows:
            (piece,) = self.pieces
            return line[:, piece.start * repeat : (piece.start + piece.length) * repeat]
        return self._stacked(line, repeat)

    def keys(self, line: Tensor) -> Tensor:
        """[G, T, D] -> [pieces * G, rows, D]; the line itself for a stretch that is left in it."""
        return self._stacked(line, 1) if self.rows else line

    def _stacked(self, line: Tensor, repeat: int) -> Tensor:
        groups, _, width = line.shape
        size = self.rows * repeat
        if line.size(1) == len(self.pieces) * size and all(piece.length == self.rows for piece in self.pieces):
            return line.unflatten(1, (-1, size)).transpose(0, 1).reshape(-1, size, width)
        stacked = line.new_zeros(len(self.pieces), groups, size, width)
        for into, piece in zip(stacked, self.pieces, strict=True):
            rows = slice(piece.start * repeat, (piece.start + piece.length) * repeat)
            into[:, : piece.length * repeat] = line[:, rows]
        return stacked.flatten(0, 1)

    def back(self, stacked: Tensor, line: Tensor, repeat: int) -> None:
        """What lies in ``stacked`` to its place in ``line``, where it is not there already."""
        if self.rows:
            for piece, rows in zip(self.pieces, stacked.unflatten(0, (len(self.pieces), -1)), strict=True):
                into = slice(piece.start * repeat, (piece.start + piece.length) * repeat)
                line[:, into] = rows[:, : piece.length * repeat]


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores become probabilities."""

    scale: float
    """What the product of a query and a key is multiplied by."""
    repeat: int
    """Query heads to each key head; their queries follow one another."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) before they are masked."""


@functools.lru_cache(maxsize=2)  # the layers of a step share them, forward and backward
def stacks_of(
    lengths: tuple[int, ...],
    window: int | None,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device = _CPU,
    spans: Spans | None = None,
) -> tuple[Stack, ...]:
    """Arrange the samples of a line, and cut them into blocks of queries.

    Args:
        lengths: tokens of each sample.
        window: keys that a query sees, itself included; None for all before it in its sample.
        heads: of keys, and of queries to each of them; each row of a mask is there as many times as the latter.
        dtype: of the masks.
        device: of the masks.
        spans: where in the line the queries are; None: everywhere.
    """
    cut = functools.partial(_cut, window=window, heads=heads, dtype=dtype, device=device)
    ends = torch.tensor(lengths).cumsum(0)
    line = torch.arange(int(ends[-1]))
    sample_starts = (ends - torch.tensor(lengths)).repeat_interleave(torch.tensor(lengths))

    def in_place(start: int, end: int, given: int) -> Stack:
        """A stretch of the line that stays where it is."""
        return Stack((Piece(given, end - start),), 0, cut((end - start,), line[start:end], sample_starts[start:end]))

    if spans is not None:
        before = accumulate((end - start for start, end in spans), initial=0)
        return tuple(in_place(start, end, given) for (start, end), given in zip(spans, before, strict=False))
    fill = FILL.get(dtype, 1)
    waiting = [Piece(int(end) - length, length) for length, end in zip(lengths, ends, strict=True)]
    waiting.sort(key=lambda piece: -piece.length)
    stacks = []
    while waiting:
        longest = waiting[0].length
        alike = [piece for piece in waiting if 2 * piece.length >= longest]
        if longest > HIGHEST.get(dtype, longest):
            alike = alike[:1]
        waiting = waiting[len(alike) :]
        if len(alike) == 1 and (longest % fill == 0 or len(lengths) == 1):
            start = alike[0].start
            stacks.append(in_place(start, start + longest, start))
        else:
            rows = line[: math.ceil(longest / fill) * fill]
            blocks = cut([piece.length for piece in alike], rows, torch.zeros_like(rows))
            stacks.append(Stack(tuple(alike), len(rows), blocks))
    return tuple(stacks)


def _cut(
    queries: Sequence[int],
    own: Tensor,
    sample_starts: Tensor,
    *,
    window: int | None,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Block, ...]:
    """Cut pieces into blocks.

    Args:
        queries: of each piece, the most first.
        own: int64 [most queries], each query's own key.
        sample_starts: int64, likewise, the first key of its sample.
        window: see :func:`stacks_of`, as the rest.
    """
    groups, repeat = heads
    oldest = sample_starts if window is None else torch.maximum(sample_starts, own - window + 1)
    blocks = []
    for start in range(0, len(own), QUERIES):
        end = min(start + QUERIES, len(own))
        last = int(own[end - 1]) + 1
        first = max(0, last - math.ceil((last - int(oldest[start])) / KEYS) * KEYS)
        hidden = min(int(oldest[end - 1]), int(own[start])), int(own[start])  # no key between is hidden from any query
        if hidden[1] - hidden[0] < (last - first) // 2:
            hidden = last, last  # so few that one mask for all, added by the product itself, is faster
        masks = []
        for keys in (torch.arange(first, hidden[0]), torch.arange(hidden[1], last)):
            seen = (keys <= own[start:end, None]) & (keys >= oldest[start:end, None])
            values = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)
            masks.append(values.repeat_interleave(repeat, 0).to(device))
        number = sum(length > start for length in queries)
        at_once = max(1, SCORES // (groups * repeat * (end - start) * (last - first)))
        for top in range(0, number, at_once):
            blocks.append(Block(top, min(top + at_once, number), start, end, first, last, *masks))
    return tuple(blocks)


def _scores(q: Tensor, k: Tensor, block: Block, how: Scores) -> tuple[Tensor, Tensor | None]:
    """[B, queries * repeat, keys] of one block, masked; and the slope of the cap at each of them, if there is one."""
    keys = k.transpose(1, 2)
    slope = None
    if how.softcap is None:
        if block.left.size(1) == keys.size(2):
            return torch.baddbmm(block.left, q, keys, alpha=how.scale), None
        scores = torch.baddbmm(q.new_empty(1, 1, 1), q, keys, beta=0, alpha=how.scale)
    else:
        share = torch.bmm(q, keys).mul_(how.scale / how.softcap).tanh_()
        slope = 1 - share.square()
        scores = share.mul_(how.softcap)
    scores[..., : block.left.size(1)] += block.left
    scores[..., scores.size(2) - block.right.size(1) :] += block.right
    return scores, slope


def _probabilities(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What each key gets, and what the sink of the row gets, [B, rows, 1]; ``sinks`` is [G, repeat]."""
    if sinks is None:
        return torch.softmax(scores, -1, out=scores), None
    groups, repeat = sinks.shape
    batch, rows, keys = scores.shape
    column = sinks[None, :, None].expand(batch // groups, groups, rows // repeat, repeat).reshape(batch, rows, 1)
    both = torch.cat((scores, column.to(scores.dtype)), -1)
    return torch.softmax(both, -1, out=both).split((keys, 1), -1)  # type: ignore[return-value]


def _parts(block: Block, groups: int, repeat: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Where in a stack the block's queries are, and its keys."""
    heads = slice(block.top * groups, block.bottom * groups)
    return (heads, slice(block.start * repeat, block.end * repeat)), (heads, slice(block.first, block.last))


class _LineAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, stacks: tuple[Stack, ...], how: Scores
    ) -> Tensor:
        groups, width, repeat = v.size(0), v.size(2), how.repeat
        out = q.new_empty(groups, q.size(1), width)
        for stack in stacks:
            stack_q, stack_k, stack_v = stack.queries(q, repeat), stack.keys(k), stack.keys(v)
            made = stack_q.new_empty(*stack_q.shape[:2], width) if stack.rows else stack.queries(out, repeat)
            for block in stack.blocks:
                queries, keys = _parts(block, groups, repeat)
                scores, _ = _scores(stack_q[queries], stack_k[keys], block, how)
                probabilities, _ = _probabilities(scores, sinks)
                made[queries] = torch.bmm(probabilities, stack_v[keys])
            stack.back(made, out, repeat)
        ctx.save_for_backward(q, k, v, sinks)
        ctx.stacks, ctx.how = stacks, how
        return out.unflatten(1, (-1, repeat)).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks = ctx.saved_tensors
        groups, width = v.size(0), v.size(2)
        repeat, scale = ctx.how.repeat, ctx.how.scale
        grad = grads[0].transpose(0, 1).reshape(groups, -1, width)
        grad_q, grad_k, grad_v = torch.empty_like(q), k.new_zeros(k.shape), v.new_zeros(v.shape)
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_sinks = None if sinks is None else torch.zeros(sinks.shape, dtype=wide, device=sinks.device)
        for stack in ctx.stacks:
            stack_q, stack_k, stack_v = stack.queries(q, repeat), stack.keys(k), stack.keys(v)
            upstream = stack.queries(grad, repeat)
            made_q, made_k, made_v = (
                (torch.empty_like(stack_q), torch.zeros_like(stack_k), torch.zeros_like(stack_v))
                if stack.rows
                else (stack.queries(grad_q, repeat), grad_k, grad_v)
            )
            for block in stack.blocks:
                queries, keys = _parts(block, groups, repeat)
                scores, slope = _scores(stack_q[queries], stack_k[keys], block, ctx.how)
                probabilities, at_sink = _probabilities(scores, sinks)
                grad_probabilities = torch.bmm(upstream[queries], stack_v[keys].transpose(1, 2))
                made_v[keys] += torch.bmm(probabilities.transpose(1, 2), upstream[queries])
                if grad_sinks is not None and at_sink is not None:
                    # The sink has no value, so all it does is take from the others.
                    taken = at_sink * (probabilities * grad_probabilities).sum(-1, keepdim=True, dtype=wide)
                    grad_sinks -= taken.view(-1, groups, block.end - block.start, repeat).sum((0, 2))
                grad_scores = torch._softmax_backward_data(grad_probabilities, probabilities, -1, probabilities.dtype)
                if slope is not None:
                    grad_scores = grad_scores * slope
                torch.mul(torch.bmm(grad_scores, stack_k[keys]), scale, out=made_q[queries])
                made_k[keys].add_(torch.bmm(grad_scores.transpose(1, 2), stack_q[queries]), alpha=scale)
            stack.back(made_q, grad_q, repeat)
            stack.back(made_k, grad_k, 1)
            stack.back(made_v, grad_v, 1)
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
        q: [T, G, R, D], R query heads to each key head. No key is copied for them; samples that stay where they are are
            not copied at all where q and k lie in memory with the groups outermost, as
            :func:`isthmus.engine.layers.rope.rotate` leaves them.
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
    stacks = stacks_of(lengths, window, (groups, repeat), q.dtype, q.device, spans)
    rows = q.transpose(0, 1).reshape(groups, -1, width)
    how = Scores(width**-0.5 if scale is None else scale, repeat, softcap)
    sinks = None if sinks is None else sinks.view(groups, repeat)
    return _LineAttention.apply(rows, k.transpose(0, 1), v.transpose(0, 1), sinks, stacks, how)
