"""Vocabulary-parallel and position embeddings with sparse gradient accumulation.

Autograd would allocate and add a dense gradient of the embedding's size in every micro batch.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, is_local: Tensor | None) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(rows, is_local)
        embedded = weight.index_select(0, rows)
        return embedded if is_local is None else embedded.mul_(is_local[:, None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        rows, is_local = ctx.saved_tensors
        weight = ctx.weight
        grad = grads[0] if is_local is None else grads[0] * is_local[:, None]
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is not None:
            main_grad.index_add_(0, rows, grad.to(main_grad.dtype))
            weight.grad_added_to_main_grad = True
            return None, None, None
        return torch.zeros_like(weight).index_add_(0, rows, grad), None, None


def embed(table: VocabParallelEmbedding, input_ids: Tensor, *, sequence_parallel: bool) -> Tensor:
    """Embed int64 [T] tokens to [T, 1, H], or to this rank's [T / tp, 1, H] under sequence parallelism."""
    if table.tp_group.size() == 1:
        return _Lookup.apply(table.weight, input_ids, None)[:, None]
    local = input_ids - table.vocab_start_index
    is_local = (local >= 0) & (local < table.weight.size(0))
    partial = _Lookup.apply(table.weight, local.where(is_local, 0), is_local.to(table.weight.dtype))[:, None]
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(partial)
    return reduce_from_tensor_model_parallel_region(partial)


def embed_positions(table: Tensor, position_ids: Tensor, *, sequence_parallel: bool) -> Tensor:
    """Embed int64 [T] positions with a replicated ``table`` [P, H]; the result is that of :func:`embed`."""
    if sequence_parallel:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        position_ids = position_ids.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
    return _Lookup.apply(table, position_ids, None)[:, None]
