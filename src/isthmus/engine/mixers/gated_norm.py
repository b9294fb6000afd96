"""RMSNorm by groups of channels with a SiLU gate, of Mamba-2 (arXiv 2405.21060, section 7.2)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.engine.compiled import compiled_on_gpu
from isthmus.engine.mixers.mamba2_groups import RankGroups
from isthmus.engine.mixers.sharded_mixer import parameter_entries, sharded_parameter


def gate(x: Tensor, gates: Tensor) -> Tensor:
    """``x * silu(gates)``, computed in the dtype of ``x`` and returned in that of ``gates``; saves only its inputs."""
    return _Gated.apply(x, gates, None, (1, 0.0, True))  # type: ignore[no-any-return]


class GatedNorm(nn.Module):
    """``norm(x * silu(gates)) * weight``, or ``norm(x) * weight * silu(gates)`` if the gate comes after the norm.

    The channels of a group are normalized together, also those of several ranks that share a group. Saves only its
    inputs, and the sum of squares of a shared group. ``width`` is that of this rank.
    """

    def __init__(self, width: int, groups: RankGroups, eps: float, *, gate_first: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = sharded_parameter(width, dtype=dtype)
        self.groups = groups
        self.eps = eps
        self.gate_first = gate_first

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        """[T, C] each; computed in the dtype of ``x``, at least float32, and returned in that of ``gates``."""
        if self.groups.sharing == 1:
            settings = (self.groups.local_number, self.eps, self.gate_first)
            return _Gated.apply(x, gates, self.weight, settings)  # type: ignore[no-any-return]
        squares = self.groups.summed(_Squares.apply(x, gates, self.gate_first))
        mean = squares / (x.size(-1) * self.groups.sharing)
        return _Scaled.apply(x, gates, self.weight, mean, self.eps)  # type: ignore[no-any-return]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return parameter_entries(self, prefix, sharded_offsets)


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
        grad_x, grad_gates = torch.func.vjp(lambda *inputs: compute(*inputs, None), x, gates)[1](grad)
        return grad_x, grad_gates, None
    grad_x, grad_gates, grad_weight = torch.func.vjp(compute, x, gates, weight)[1](grad)
    return grad_x, grad_gates, grad_weight


class _Squares(torch.autograd.Function):
    """The sum of squares of each token that a norm of channels of several ranks needs, [T, 1]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, gate_first: bool) -> Tensor:
        ctx.save_for_backward(x, gates)
        ctx.gate_first = gate_first
        return _squares(x, gates, gate_first)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gates = ctx.saved_tensors
        return *_squares_backward(x, gates, grads[0], ctx.gate_first), None


class _Scaled(torch.autograd.Function):
    """The norm for a given mean of squares."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, weight: Tensor, mean: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gates, weight, mean)
        ctx.eps = eps
        return _scaled(x, gates, weight, mean, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gates, weight, mean = ctx.saved_tensors
        return *_scaled_backward(x, gates, weight, mean, grads[0], ctx.eps), None


def _sum_of_squares(x: Tensor, gates: Tensor, *, gate_first: bool) -> Tensor:
    return (x * F.silu(gates.to(x.dtype)) if gate_first else x).square().sum(-1, keepdim=True)


def _scale(x: Tensor, gates: Tensor, weight: Tensor, mean: Tensor, *, eps: float) -> Tensor:
    return (x * F.silu(gates.to(x.dtype)) * (mean + eps).rsqrt() * weight).to(gates.dtype)


@compiled_on_gpu
def _squares(x: Tensor, gates: Tensor, gate_first: bool) -> Tensor:
    return _sum_of_squares(x, gates, gate_first=gate_first)


@compiled_on_gpu
def _squares_backward(x: Tensor, gates: Tensor, grad: Tensor, gate_first: bool) -> tuple[Tensor, Tensor]:
    grad_x, grad_gates = torch.func.vjp(partial(_sum_of_squares, gate_first=gate_first), x, gates)[1](grad)
    return grad_x, grad_gates


@compiled_on_gpu
def _scaled(x: Tensor, gates: Tensor, weight: Tensor, mean: Tensor, eps: float) -> Tensor:
    return _scale(x, gates, weight, mean, eps=eps)


@compiled_on_gpu
def _scaled_backward(
    x: Tensor, gates: Tensor, weight: Tensor, mean: Tensor, grad: Tensor, eps: float
) -> tuple[Tensor, ...]:
    grads: tuple[Tensor, ...] = torch.func.vjp(partial(_scale, eps=eps), x, gates, weight, mean)[1](grad)
    return grads
