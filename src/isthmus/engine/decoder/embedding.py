"""Token and position embeddings, sharded over tp by vocabulary, with sparse gradient accumulation.

Autograd would allocate and add a dense gradient of the embedding's size in every micro batch.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.decoder_config import DecoderConfig
from isthmus.families.architecture import Architecture


class TokenEmbedding(LanguageModelEmbedding):
    """The embedding of tokens, and of their positions if these are learned."""

    fsdp_unit: str | None = None

    def __init__(self, config: DecoderConfig, architecture: Architecture, rows: int) -> None:
        """``rows`` are those of the table, with padding."""
        embedding = architecture.embedding
        positions = architecture.max_position_embeddings + embedding.position_offset
        kind: Any = "learned_absolute" if embedding.position == "learned" else "none"
        super().__init__(config, rows, positions, kind)
        self.multiplier: float = embedding.embedding_multiplier
        self.position_offset: int = embedding.position_offset
        if not (architecture.head.tie_embeddings or embedding.layer_input_size):
            self.fsdp_unit = "embedding"  # else other modules use its weights too

    def forward(self, batch: PackedBatch) -> Tensor:  # type: ignore[override]
        """Embeddings [T, 1, H] of the tokens; under sequence parallelism this rank's [T / tp, 1, H]."""
        sequence_parallel = self.config.sequence_parallel
        hidden = embed(self.word_embeddings, batch.input_ids, sequence_parallel=sequence_parallel)
        if self.multiplier != 1:
            # Rounded to the model's dtype first, as transformers does.
            hidden = hidden * torch.tensor(self.multiplier, dtype=hidden.dtype)
        if self.add_position_embedding:
            rows = batch.position_ids + self.position_offset
            weight = self.position_embeddings.weight
            hidden = hidden + embed_positions(weight, rows, sequence_parallel=sequence_parallel)
        return hidden


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, is_local: Tensor | None) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(rows, is_local)
        embedded = weight.index_select(0, rows).unsqueeze_(1)
        return embedded if is_local is None else embedded.mul_(is_local[:, None, None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        rows, is_local = ctx.saved_tensors
        weight = ctx.weight
        grad = grads[0][:, 0] if is_local is None else grads[0][:, 0] * is_local[:, None]
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is not None:
            main_grad.index_add_(0, rows, grad.to(main_grad.dtype))
            weight.grad_added_to_main_grad = True
            return None, None, None
        return torch.zeros_like(weight).index_add_(0, rows, grad), None, None


def embed(table: VocabParallelEmbedding, input_ids: Tensor, *, sequence_parallel: bool) -> Tensor:
    """Embed int64 [T] tokens to [T, 1, H], or to this rank's [T / tp, 1, H] under sequence parallelism."""
    if table.tp_group.size() == 1:
        return _Lookup.apply(table.weight, input_ids, None)
    local = input_ids - table.vocab_start_index
    is_local = (local >= 0) & (local < table.weight.size(0))
    partial = _Lookup.apply(table.weight, local.where(is_local, 0), is_local.to(table.weight.dtype))
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(partial)
    return reduce_from_tensor_model_parallel_region(partial)


def embed_positions(table: Tensor, position_ids: Tensor, *, sequence_parallel: bool) -> Tensor:
    """Embed int64 [T] positions with a replicated ``table`` [P, H]; the result is that of :func:`embed`."""
    if sequence_parallel:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        position_ids = position_ids.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
    return _Lookup.apply(table, position_ids, None)
