"""RMSNorm and LayerNorm for Megatron-Core layers, with sequence parallelism."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class _Norm(nn.Module):
    """Parameters of a norm over the last dim; under sequence parallelism their gradients are summed over tp."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.shape = (hidden_size,)
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype)) if bias else None
        for parameter in self.parameters():
            # finalize_model_grads reads this mark: each rank saw only its part of the sequence.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class RMSNorm(_Norm):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim (arXiv 1910.07467)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., hidden_size]; the sum of squares is taken in float32."""
        return torch.rms_norm(x, self.shape, self.weight, self.eps)


class LayerNorm(_Norm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dim (arXiv 1607.06450)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., hidden_size]."""
        return torch.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
