"""Context parallelism: which tokens of a line each rank has, and how it gets to see the keys before them.

A line is cut into chunks of equal length that are dealt to the ranks forth and back (0, 1, ..., 1, 0, 0, 1, ...), in
several turns. A token costs as much attention as there are tokens before it in its sample, so two neighbouring turns
even out what one long sample costs, and many turns what several do; nothing is padded but the line. All that concerns a
token alone is done for a rank's own tokens. For attention the ranks exchange keys and values: each gathers those of the
whole line, as Llama 3 was trained (arXiv 2407.21783, section 3.3.2); what a ring would save is in docs/decisions/0013.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

Spans = tuple[tuple[int, int], ...]
"""Stretches [start, end) of a line, in its order."""

TURNS = 8
"""Times that each rank is dealt two chunks of a long line."""
FEWEST = 64
"""Tokens of a chunk below which there are fewer turns: about a block of queries in line_attention."""


@functools.lru_cache(maxsize=8)
def spans_of(tokens: int, ranks: int) -> tuple[Spans, ...]:
    """Deal a line out: for each rank the stretches that are its own, as many tokens as any other's.

    Args:
        tokens: of the line, a multiple of 2 * ``ranks``.
        ranks: of the context parallel group.

    Raises:
        ValueError: the line cannot be cut so.
    """
    chunk, rest = divmod(tokens, 2 * ranks)
    if rest or not chunk:
        raise ValueError(f"a line of {tokens} tokens cannot be cut into 2 x {ranks} equal chunks")
    turns = max(1, min(TURNS, chunk // FEWEST))
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    start = 0
    for turn in range(turns):
        size = chunk * (turn + 1) // turns - chunk * turn // turns
        for own in (*dealt, *reversed(dealt)):
            touching = bool(own) and own[-1][1] == start
            own.append((own.pop()[0] if touching else start, start + size))
            start += size
    return tuple(tuple(own) for own in dealt)


def own_spans(tokens: int) -> Spans | None:
    """What this rank has of a line; None without context parallelism, which is all of it."""
    ranks = parallel_state.get_context_parallel_world_size()
    return None if ranks == 1 else spans_of(tokens, ranks)[parallel_state.get_context_parallel_rank()]


def own_part(line: Tensor, spans: Spans | None) -> Tensor:
    """Of a tensor [T, ...] of the whole line, the tokens in ``spans``: [T / cp, ...]."""
    return line if spans is None else torch.cat([line[start:end] for start, end in spans])


@functools.lru_cache(maxsize=8)
def _line_order(tokens: int, ranks: int) -> tuple[tuple[int, slice], ...]:
    """The stretches of a line in its order: whose it is, and where among that rank's tokens it lies."""
    held = []
    for rank, spans in enumerate(spans_of(tokens, ranks)):
        at = 0
        for start, end in spans:
            held.append((start, rank, slice(at, at + end - start)))
            at += end - start
    return tuple((rank, place) for _, rank, place in sorted(held))


class _GatherLine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        own = part.transpose(0, 1).contiguous()
        everyone = own.new_empty(group.size(), *own.shape)
        dist.all_gather_into_tensor(everyone.flatten(0, 1), own, group=group)
        order = _line_order(group.size() * own.size(1), group.size())
        return torch.cat([everyone[rank, :, place] for rank, place in order], dim=1).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        line, ranks = grads[0].transpose(0, 1), ctx.group.size()
        everyone = line.new_empty(ranks, line.size(0), line.size(1) // ranks, line.size(2))
        for theirs, spans in zip(everyone, spans_of(line.size(1), ranks), strict=True):
            torch.cat([line[:, start:end] for start, end in spans], dim=1, out=theirs)
        own = torch.empty_like(everyone[0])
        dist.reduce_scatter_tensor(own, everyone.flatten(0, 1), group=ctx.group)
        return own.transpose(0, 1), None


def gather_line(part: Tensor) -> Tensor:
    """What all ranks of the context parallel group have of a line, in its order.

    Args:
        part: [T / cp, G, W] of this rank's tokens.

    Returns:
        [T, G, W], in memory with G outermost. Its gradient, of which each rank has that of its own queries, is summed
        over the ranks, and each gets that of its own tokens.
    """
    return _GatherLine.apply(part, parallel_state.get_context_parallel_group())  # type: ignore[no-any-return]
