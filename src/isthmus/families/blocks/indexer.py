"""The indexer of sparse attention (DeepSeek-V3.2), which selects the keys of each query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from isthmus.families.blocks.block import Linear, MicroBatch

BLOCK_QUERIES = 256
"""Queries that are scored at a time."""


@dataclass(frozen=True, kw_only=True)
class KeyIndexer:
    """Selection of the keys that a query attends to, if there are more than ``top_k``."""

    prefix: ClassVar[str] = "indexer"

    top_k: int
    num_heads: int
    head_dim: int
    rotary_interleaved: bool = False
    shared_layers: tuple[int, ...] = ()
    """Layers, counted from 0, that use the selection of the layer before and have no indexer."""

    def linears(self, query_rank: int, hidden_size: int) -> list[Linear]:
        return [
            Linear(self.num_heads * self.head_dim, query_rank, fp8=False),
            Linear(self.head_dim + self.num_heads, hidden_size, fp8=False),
        ]

    def flops(self, num_tokens: int, pairs: float, *, query_rank: int, hidden_size: int) -> float:
        """FLOPs of a selection, which runs if samples have more keys than it selects; there is no backward pass."""
        if 2 * pairs <= self.top_k * num_tokens:
            return 0.0
        weights = sum(linear.weights for linear in self.linears(query_rank, hidden_size))
        return 2.0 * (weights * num_tokens + self.num_heads * self.head_dim * pairs)

    def buffer_elements(self, batch: MicroBatch, attention_heads: int) -> int:
        """Float32 scores, probabilities and gradients of a block of queries, of the indexer and of attention."""
        heads = 4 * attention_heads // batch.tp + 2 * self.num_heads
        return 4 * heads * BLOCK_QUERIES * batch.longest // batch.bytes_per_element

    def symbols(self) -> dict[str, int]:
        return {"Ni": self.num_heads, "Di": self.head_dim}
