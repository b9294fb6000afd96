"""Attention of each query to selected keys of its sample, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from isthmus.families.blocks.indexer import BLOCK_QUERIES


def query_blocks(length: int) -> Iterator[slice]:
    """The queries of a sample in blocks."""
    return (slice(start, min(start + BLOCK_QUERIES, length)) for start in range(0, length, BLOCK_QUERIES))


def causal_keys(queries: slice, keys: int, device: torch.device) -> Tensor:
    """Whether each of a block of queries may attend to each of the first ``keys`` keys, bool [queries, keys]."""
    positions = torch.arange(queries.start, queries.stop, device=device)
    return torch.arange(keys, device=device) <= positions[:, None]


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], selected: Sequence[Tensor], scale: float
) -> Tensor:
    """Attend causally to the selected keys; returns [T, heads * Dv].

    Scores are computed again in the backward pass: only the arguments are saved.

    Args:
        q: [T, heads, 1, D].
        k: [T, heads, D].
        v: [T, heads, Dv].
        lengths: tokens of each sample; their sum is T.
        selected: of each sample, int32 [L, any number], positions in the sample.
        scale: factor of the scores.
    """
    parts = (x.split(tuple(lengths)) for x in (q[:, :, 0], k, v))
    out = []
    for sample_q, sample_k, sample_v, chosen in zip(*parts, selected, strict=True):
        for block in query_blocks(len(sample_k)):
            end = block.stop
            args = sample_q[block], sample_k[:end], sample_v[:end], chosen[block], block, scale
            out.append(checkpoint(_attend, *args, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(out).flatten(1)


def _attend(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, block: slice, scale: float) -> Tensor:
    """[queries, heads, Dv] of one block."""
    keys = len(k)
    # A query with few keys before it selects all of them and later ones, which the causal mask leaves out.
    seen = torch.zeros(len(q), keys, dtype=torch.bool, device=q.device)
    seen = seen.scatter_(1, chosen.long().clamp(max=keys - 1), True) & causal_keys(block, keys, q.device)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    wide = torch.promote_types(scores.dtype, torch.float32)
    probabilities = scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=wide).to(v.dtype)
    return torch.einsum("hqk,khd->qhd", probabilities, v)
