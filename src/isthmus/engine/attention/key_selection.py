"""The indexer of sparse attention (DeepSeek-V3.2), which selects the keys that each query attends to."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.attention.rope import rotate
from isthmus.engine.attention.sparse_attention import causal_keys, query_blocks
from isthmus.engine.layers.norm import LayerNorm
from isthmus.engine.layers.row_ranges import all_tokens
from isthmus.engine.linear.linear import ReplicatedLinear
from isthmus.errors import UsageError
from isthmus.families.blocks.indexer import KeyIndexer

_NORM_EPSILON = 1e-6


class Indexer(nn.Module):
    """Scores ``sum_h w_h relu(q_h k) / sqrt(heads D)`` select the best ``top_k`` keys of a query, all if it has fewer.

    Its heads are few, and every tp rank has all of them. As in transformers no gradient reaches its weights.
    """

    def __init__(self, config: TransformerConfig, sizes: KeyIndexer, query_rank: int, family: str) -> None:
        """``query_rank`` is the width of low-rank queries, ``family`` the model's, for errors."""
        super().__init__()
        self.config = config
        self.sizes = sizes
        self.family = family
        self.linear_wq_b = ReplicatedLinear(config, query_rank, sizes.num_heads * sizes.head_dim)
        self.linear_wk = ReplicatedLinear(config, config.hidden_size, sizes.head_dim)
        self.k_norm = LayerNorm(config, sizes.head_dim, _NORM_EPSILON, bias=True)
        self.linear_weights_proj = ReplicatedLinear(config, config.hidden_size, sizes.num_heads)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, hidden: Tensor, compressed: Tensor, table: Tensor, batch: PackedBatch) -> list[Tensor] | None:
        """The selected keys of each sample, int32 [L, min(top_k, L)]; None if no sample has more than ``top_k``.

        Args:
            hidden: [T, 1, H], or [T / tp, 1, H] under sequence parallelism.
            compressed: low-rank queries after their norm, [T, 1, q_lora_rank] or a part like ``hidden``.
            table: that of :func:`~isthmus.engine.attention.rope.rotary_tables`.

        Raises:
            UsageError: a sample has more keys, and the model is not supported then.
        """
        if max(batch.lengths) <= self.sizes.top_k:
            return None
        if self.sizes.shared_layers:
            raise UsageError(
                f"a sample has {max(batch.lengths)} tokens: beyond index_topk={self.sizes.top_k}, layers that share "
                f"the selected keys of another are not supported ({self.family}). Cut the sample."
            )
        if self.config.sequence_parallel:
            hidden, compressed = (gather_from_sequence_parallel_region(x) for x in (hidden, compressed))
        q = self.linear_wq_b(compressed).view(-1, self.sizes.num_heads, self.sizes.head_dim)
        k = self.k_norm(self.linear_wk(hidden))
        q, k = (rotate(x, table, interleaved=self.sizes.rotary_interleaved).float() for x in (q, k))
        weights = self.linear_weights_proj(hidden)[:, 0].float() * self.sizes.num_heads**-0.5
        parts = (all_tokens(x, batch.shared).split(batch.lengths) for x in (q, k[:, 0], weights))
        return [self._selected(*sample) for sample in zip(*parts, strict=True)]

    def _selected(self, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        """Selected keys of one sample: q [L, heads, D], k [L, D], weights [L, heads]."""
        top_k, selected = min(self.sizes.top_k, len(k)), []
        for block in query_blocks(len(k)):
            scores = torch.einsum("qhd,kd->qhk", q[block], k).mul_(self.sizes.head_dim**-0.5).relu_()
            key_scores = torch.einsum("qh,qhk->qk", weights[block], scores)
            key_scores.masked_fill_(~causal_keys(block, len(k), k.device), -torch.inf)
            selected.append(key_scores.topk(top_k, dim=-1).indices.int())
        return torch.cat(selected)
