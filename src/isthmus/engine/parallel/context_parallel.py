"""Context parallelism: partition of a packed sequence over ranks, and the all-gather of keys and values.

Chunks of equal length are zigzag-partitioned over the ranks (0, 1, ..., 1, 0) in several rounds: two rounds balance
the attention of one long sample, many rounds balance several samples. For attention each rank gathers all keys and
values, as in Llama 3 (arXiv 2407.21783, section 3.3.2); docs/decisions/0013 compares this with a ring.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.data.batching.shared_prefixes import Spans

MAX_ROUNDS = 8
"""Each rank gets two chunks per round."""
MIN_CHUNK = 64
"""Minimum tokens of a chunk, about a block of queries of the attention on a CPU; below it there are fewer rounds."""


@functools.lru_cache(maxsize=8)
def partition(tokens: int, ranks: int) -> tuple[Spans, ...]:
    """Spans of each rank, with equal numbers of tokens; raises ValueError unless 2 * ranks divides ``tokens``."""
    chunk, rest = divmod(tokens, 2 * ranks)
    if rest or not chunk:
        raise ValueError(f"a packed sequence of {tokens} tokens cannot be cut into 2 x {ranks} equal chunks")
    rounds = max(1, min(MAX_ROUNDS, chunk // MIN_CHUNK))
    rank_spans: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    start = 0
    for number in range(rounds):
        size = chunk * (number + 1) // rounds - chunk * number // rounds
        for spans in (*rank_spans, *reversed(rank_spans)):
            adjacent = bool(spans) and spans[-1][1] == start
            spans.append((spans.pop()[0] if adjacent else start, start + size))
            start += size
    return tuple(tuple(spans) for spans in rank_spans)


def local_spans(tokens: int) -> Spans | None:
    ranks = parallel_state.get_context_parallel_world_size()
    return None if ranks == 1 else partition(tokens, ranks)[parallel_state.get_context_parallel_rank()]


def local_tokens(rows: Tensor, spans: Spans | None) -> Tensor:
    """Rows in ``spans`` of [T, ...] over the whole packed sequence: [T / cp, ...]."""
    return rows if spans is None else torch.cat([rows[start:end] for start, end in spans])


def local_batch(batch: PackedBatch) -> PackedBatch:
    spans = None if batch.states is not None else local_spans(batch.input_ids.numel())
    if spans is None:
        return batch
    return replace(
        batch,
        spans=spans,
        input_ids=local_tokens(batch.input_ids, spans),
        position_ids=local_tokens(batch.position_ids, spans),
        labels=None if batch.labels is None else local_tokens(batch.labels, spans),
        loss_mask=None if batch.loss_mask is None else local_tokens(batch.loss_mask, spans),
    )


@functools.lru_cache(maxsize=8)
def _sequence_order(tokens: int, ranks: int) -> tuple[tuple[int, slice], ...]:
    """All ranks' spans in sequence order: (rank, rows of that rank's tokens)."""
    pieces = []
    for rank, spans in enumerate(partition(tokens, ranks)):
        offset = 0
        for start, end in spans:
            pieces.append((start, rank, slice(offset, offset + end - start)))
            offset += end - start
    return tuple((rank, rows) for _, rank, rows in sorted(pieces))


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        local = part.transpose(0, 1).contiguous()
        gathered = local.new_empty(group.size(), *local.shape)
        dist.all_gather_into_tensor(gathered.flatten(0, 1), local, group=group)
        order = _sequence_order(group.size() * local.size(1), group.size())
        return torch.cat([gathered[rank, :, rows] for rank, rows in order], dim=1).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad, ranks = grads[0].transpose(0, 1), ctx.group.size()
        by_rank = grad.new_empty(ranks, grad.size(0), grad.size(1) // ranks, grad.size(2))
        for part, spans in zip(by_rank, partition(grad.size(1), ranks), strict=True):
            torch.cat([grad[:, start:end] for start, end in spans], dim=1, out=part)
        local = torch.empty_like(by_rank[0])
        dist.reduce_scatter_tensor(local, by_rank.flatten(0, 1), group=ctx.group)
        return local.transpose(0, 1), None


def gather_sequence(part: Tensor) -> Tensor:
    """All-gather [T / cp, G, W] over cp ranks to [T, G, W] in sequence order, with G outermost in memory."""
    return _GatherSequence.apply(part, parallel_state.get_context_parallel_group())
