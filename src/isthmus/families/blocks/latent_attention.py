"""Multi-head latent attention (arXiv 2405.04434): low-rank projections of queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from isthmus.families.blocks.attention import SAVED, Attention
from isthmus.families.blocks.block import NO_SETTING, Linear, MicroBatch, RehearsalSizes
from isthmus.families.blocks.indexer import KeyIndexer


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Ranks and widths of latent attention."""

    prefix: ClassVar[str] = "mla"

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    """None: queries have no low-rank projection."""
    norm_epsilon: float = 1e-6
    """Epsilon of the norms of the low-rank vectors."""


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Attention):
    latent: Latent = field(metadata=NO_SETTING, repr=False)
    indexer: KeyIndexer | None = field(default=None, metadata=NO_SETTING, repr=False)
    """Selects keys."""
    has_indexer: bool = field(default=True, metadata=NO_SETTING, repr=False)
    """Whether the layer computes the indexer, and does not use the keys that an earlier layer selected."""

    @property
    def selected_keys(self) -> int | None:
        return None if self.indexer is None else self.indexer.top_k

    @property
    def selection_scores(self) -> tuple[int, int] | None:
        indexer = self.computed_indexer
        return None if indexer is None else (indexer.num_heads, indexer.head_dim)

    @property
    def computed_indexer(self) -> KeyIndexer | None:
        """The indexer of this layer."""
        return self.indexer if self.has_indexer else None

    @property
    def value_width(self) -> int:
        return self.latent.v_head_dim

    @property
    def rotary_width(self) -> int:
        return 0 if self.rotary is None else self.latent.qk_rope_head_dim

    @property
    def rule_kinds(self) -> tuple[str, ...]:
        return super().rule_kinds + (("indexed",) if self.computed_indexer is not None else ())

    @property
    def kernel_groups(self) -> int:
        return self.num_attention_heads

    def linears(self, tp: int = 1) -> list[Linear]:
        """Down projections are whole on each rank, up projections are split by heads."""
        latent, heads, hidden = self.latent, self.num_attention_heads / tp, self.hidden_size
        rows = heads * self.kv_channels
        if latent.q_lora_rank is None:
            queries = [Linear(rows, hidden, "column")]
        else:
            queries = [Linear(latent.q_lora_rank, hidden, fp8=False), Linear(rows, latent.q_lora_rank, "column")]
        return [
            *self._gate(tp),
            *queries,
            Linear(latent.kv_lora_rank + latent.qk_rope_head_dim, hidden, fp8=False),
            Linear(heads * (latent.qk_nope_head_dim + latent.v_head_dim), latent.kv_lora_rank, "column"),
            Linear(hidden, heads * latent.v_head_dim, "row"),
        ]

    def pairs(self, num_tokens: int, sum_squared_lengths: int) -> float:
        pairs = super().pairs(num_tokens, sum_squared_lengths)
        return pairs if self.selected_keys is None else min(pairs, float(self.selected_keys) * num_tokens)

    def selection_flops(self, num_tokens: int, sum_squared_lengths: int) -> float:
        if (indexer := self.computed_indexer) is None:
            return 0.0
        pairs = super().pairs(num_tokens, sum_squared_lengths)
        inside = self.latent.q_lora_rank or 0
        return indexer.flops(num_tokens, pairs, query_rank=inside, hidden_size=self.hidden_size)

    def saved_bytes(self, batch: MicroBatch) -> dict[str, int]:
        """GPU kernels have values and outputs as wide as keys."""
        latent, keys, values = self.latent, self.kv_channels, self.value_width
        kernel = keys + (2 * keys if batch.on_gpu else latent.qk_nope_head_dim + values)  # keys, values; output
        gated = 1 + values if self.head_gate else 0
        recomputed = "core_attn" in batch.recomputed
        channels = self.num_attention_heads * (keys + values + gated + (0 if recomputed else kernel))
        selected = self.selected_keys
        kept_keys = 0 if selected is None or batch.longest <= selected else selected
        low_rank = 2 * ((latent.q_lora_rank or 0) + latent.kv_lora_rank + latent.qk_rope_head_dim)
        return {
            SAVED: batch.num_tokens * channels // batch.tp * batch.bytes_per_element,
            **self._gathered(batch, self.num_attention_heads, self.value_channels or keys),
            "low-rank queries, keys and values, with their norms": (
                batch.num_tokens * low_rank * batch.bytes_per_element
            ),
            "selected keys": 4 * batch.num_tokens * kept_keys,
        }

    def buffer_elements(self, batch: MicroBatch) -> int:
        if self.indexer is None or batch.longest <= self.indexer.top_k:
            return 0
        return self.indexer.buffer_elements(batch, self.num_attention_heads)

    def state_elements(self, num_tokens: int, tp: int = 1) -> int:
        """Latent vectors and rotated key channels, which all heads share."""
        return self.kept_tokens(num_tokens) * (self.latent.kv_lora_rank + self.latent.qk_rope_head_dim)

    @property
    def longest_with_state(self) -> int | None:
        """A query of a longer sequence attends to the keys that the indexer selects."""
        limits = [super().longest_with_state, None if self.indexer is None else self.indexer.top_k]
        return min((limit for limit in limits if limit is not None), default=None)

    def symbols(self) -> dict[str, int]:
        latent = self.latent
        sizes = {
            "Rq": latent.q_lora_rank or 0,
            "Rk": latent.kv_lora_rank,
            "Kd": latent.kv_lora_rank + latent.qk_rope_head_dim,
            "Qh": self.kv_channels,
            "Kv": latent.qk_nope_head_dim + latent.v_head_dim,
        }
        return super().symbols() | sizes | ({} if self.indexer is None else self.indexer.symbols())

    def _groups_mismatch(self, tp: int) -> str | None:
        return None

    def small(self, sizes: RehearsalSizes) -> LatentAttention:
        width = sizes.head_dim
        latent = replace(
            self.latent,
            kv_lora_rank=32,
            q_lora_rank=self.latent.q_lora_rank and 32,
            qk_nope_head_dim=width,
            qk_rope_head_dim=width,
            v_head_dim=width,
        )
        indexer = self.indexer and replace(self.indexer, num_heads=min(self.indexer.num_heads, 4), head_dim=2 * width)
        small: LatentAttention = super().small(sizes)
        return replace(small, kv_channels=2 * width, latent=latent, indexer=indexer)
