"""RMSNorm by groups of channels with a SiLU gate, of Mamba-2 (arXiv 2405.21060, section 7.2)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.engine.compiled import compiled_on_gpu
from isthmus.engine.mixers.sharded_mixer import own_entries, sharded_parameter


def gate(x: Tensor, gates: Tensor) -> Tensor:
    """``x * silu(gates)``, computed in the dtype of ``x`` and returned in that of ``gates``; saves only its inputs."""
    return _Gated.apply(x, gates, None, (1, 0.0, True))  # type: ignore[no-any-return]


class GatedNorm(nn.Module):
    """``norm(x * silu(gates)) * weight``, or ``norm(x) * weight * silu(gates)`` if the gate comes after the norm.

    The channels of a group are normalized together. Saves only its inputs. Width and groups are those of this rank.
    """

    def __init__(self, width: int, groups: int, eps: float, *, gate_first: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = sharded_parameter(width, dtype=dtype)
        self.settings = (groups, eps, gate_first)

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        """[T, C] each; computed in the dtype of ``x``, at least float32, and returned in that of ``gates``."""
        return _Gated.apply(x, gates, self.weight, self.settings)  # type: ignore[no-any-return]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return own_entries(self, prefix, sharded_offsets)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, weight: Tensor | None, settings: tuple[int, float, bool]) -> Tensor:
        ctx.save_for_backward(x, gates, weight)
        ctx.settings = settings
        return _gated(x, gates, weight, *settings)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gates, weight = ctx.saved_tensors
        return *_backward(x, gates, weight, grads[0], *ctx.settings), None


def _compute(x: Tensor, gates: Tensor, weight: Tensor | None, *, groups: int, eps: float, gate_first: bool) -> Tensor:
    factor = F.silu(gates.to(x.dtype))
    if weight is None:
        return (x * factor).to(gates.dtype)
    inner = (x * factor if gate_first else x).unflatten(-1, (groups, -1))
    normed = (inner * (inner.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2) * weight
    return (normed if gate_first else normed * factor).to(gates.dtype)


@compiled_on_gpu
def _gated(x: Tensor, gates: Tensor, weight: Tensor | None, groups: int, eps: float, gate_first: bool) -> Tensor:
    return _compute(x, gates, weight, groups=groups, eps=eps, gate_first=gate_first)


@compiled_on_gpu
def _backward(
    x: Tensor, gates: Tensor, weight: Tensor | None, grad: Tensor, groups: int, eps: float, gate_first: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    compute: Any = partial(_compute, groups=groups, eps=eps, gate_first=gate_first)
    if weight is None:
        grad_x, grad_gates = torch.func.vjp(lambda *given: compute(*given, None), x, gates)[1](grad)
        return grad_x, grad_gates, None
    grad_x, grad_gates, grad_weight = torch.func.vjp(compute, x, gates, weight)[1](grad)
    return grad_x, grad_gates, grad_weight
