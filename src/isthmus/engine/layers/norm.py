"""RMSNorm and LayerNorm for Megatron-Core layers, with sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class _Norm(nn.Module):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, bias: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.shape = (hidden_size,)
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype)) if bias else None
        for parameter in self.parameters():
            # finalize_model_grads reads it: each rank has a part of the sequence.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def gain(self) -> Tensor:
        """``1 + weight`` is computed in float32, which does not round it."""
        return self.weight.float() + 1 if self.zero_centered else self.weight


class _RMSNormFunction(torch.autograd.Function):
    """Saves its input and one scale per row; torch's CPU version is six operations that each save their input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.size(-1))
        scale = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad = grads[0].to(scale.dtype)
        normed = x.to(scale.dtype) * scale
        grad_weight = (normed * grad).flatten(0, -2).sum(0)
        grad_normed = grad * weight
        along = torch.linalg.vecdot(normed, grad_normed).unsqueeze(-1).div_(x.size(-1))
        grad_x = normed.mul_(along).neg_().add_(grad_normed).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class RMSNorm(_Norm):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim (arXiv 1910.07467)."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return _RMSNormFunction.apply(x, self.gain(), self.eps)
        if self.zero_centered:
            return torch.rms_norm(x.float(), self.shape, self.gain(), self.eps).to(x.dtype)
        return torch.rms_norm(x, self.shape, self.weight, self.eps)


class LayerNorm(_Norm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dim (arXiv 1607.06450)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.layer_norm(x, self.shape, self.gain().to(x.dtype), self.bias, self.eps)


class ProjectionNorm(_Norm):
    """RMSNorm over the channels of all heads, sharded over tp ranks.

    Every rank has all weights and uses those of its heads; Megatron-Core sums their gradients. ``num_heads`` counts the
    heads of all ranks; with fewer heads than ranks, several ranks have the same head.
    """

    def __init__(
        self, config: TransformerConfig, num_heads: int, head_dim: int, eps: float, *, rank: int, ranks: int
    ) -> None:
        super().__init__(config, num_heads * head_dim, eps)
        self.copies = max(1, ranks // num_heads)
        width = num_heads * head_dim * self.copies // ranks
        self.ranks = ranks
        self.own = slice(rank // self.copies * width, (rank // self.copies + 1) * width)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [T, ...] has this rank's channels."""
        wide = x.flatten(1).to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum(-1, keepdim=True)
        if self.ranks > 1:
            # The scale depends on all ranks' channels: forward and backward sum over the ranks.
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        scale = (squares / (self.copies * self.shape[0]) + self.eps).rsqrt()
        return (wide * scale * self.gain()[self.own]).to(x.dtype).view_as(x)
