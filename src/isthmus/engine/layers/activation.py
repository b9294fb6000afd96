"""Activations of feed-forward blocks, gated and plain."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from isthmus.engine.compiled import compiles
from isthmus.engine.layers.fused_function import fused
from isthmus.families.blocks.feed_forward import Activation as ActivationName


def swiglu(x: Tensor) -> Tensor:
    """``silu(gate) * up`` for ``x`` = [gate; up] on the last dim (arXiv 2002.05202)."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def scaled_swiglu(x: Tensor, *, multiplier: float) -> Tensor:
    """``silu(multiplier * gate) * up`` (Falcon-H1, arXiv 2507.22448)."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate * multiplier) * up


def limited_swiglu(x: Tensor, *, limit: float) -> Tensor:
    """``min(silu(gate), limit) * clamp(up, -limit, limit)`` (Step 3.5)."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def clamped_swiglu(x: Tensor) -> Tensor:
    """``min(gate, 7) * sigmoid(1.702 gate) * (clamp(up, -7, 7) + 1)`` (gpt-oss, arXiv 2508.10925)."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def geglu(x: Tensor, *, approximate: str) -> Tensor:
    """``gelu(gate) * up`` for ``x`` = [gate; up] on the last dim (arXiv 2002.05202)."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def relu2(x: Tensor) -> Tensor:
    """``relu(x) ** 2`` (arXiv 2109.08668)."""
    return torch.nn.functional.relu(x).square()


def _gated(x: Tensor, *, function: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return function(gate) * up


@functools.cache  # one function for all layers: each is compiled by itself
def activation_function(
    name: ActivationName, *, gated: bool, multiplier: float = 1.0, limit: float | None = None
) -> Callable[[Tensor], Tensor]:
    """The activation [..., F] of the output of the first projection: [..., F], or [gate; up] of 2 F if ``gated``.

    ``multiplier`` is that of the gate of ``silu``, ``limit`` that of :func:`limited_swiglu`.
    """
    if limit is not None:
        return functools.partial(limited_swiglu, limit=limit)
    if multiplier != 1:
        return functools.partial(scaled_swiglu, multiplier=multiplier)
    if name == "silu":
        return swiglu if gated else torch.nn.functional.silu
    if name == "clamped_swiglu":
        return clamped_swiglu
    if name in ("relu", "relu2"):
        function = relu2 if name == "relu2" else torch.nn.functional.relu
        return functools.partial(_gated, function=function) if gated else function
    tanh = "tanh" if name == "gelu_tanh" else "none"
    return functools.partial(geglu if gated else torch.nn.functional.gelu, approximate=tanh)


class _SwiGLU(torch.autograd.Function):
    """Saves only its input and writes both halves of the gradient in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return swiglu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(grads[0], torch.nn.functional.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward(grads[0] * up, gate, grad_input=grad_gate)
        return grad_x


class Activation(nn.Module):
    def __init__(self, config: TransformerConfig, *, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        if compiles(x):
            return fused(self.function)(x)
        return _SwiGLU.apply(x) if self.function is swiglu and torch.is_grad_enabled() else self.function(x)

    def sharded_state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """Megatron-Core's MLP calls it on each submodule."""
        return {}


class Xielu(nn.Module):
    """xIELU (arXiv 2411.13010): ``beta x`` plus a parabola above zero and an exponential below, of learned sizes.

    ``beta`` and ``eps`` are not trained.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        for name in ("alpha_p", "alpha_n", "beta", "eps"):
            trained = name.startswith("alpha")
            value = torch.zeros(1, dtype=config.params_dtype)
            self.register_parameter(name, nn.Parameter(value, requires_grad=trained))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` has this rank's channels; the gradients of the parameters are summed over the ranks."""
        sizes = (copy_to_tensor_model_parallel_region(size) for size in (self.alpha_p, self.alpha_n))
        return fused(_xielu)(x, *sizes, self.beta, self.eps)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        tensors = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(tensors, prefix, {}, sharded_offsets)


def _xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    above, below = nn.functional.softplus(alpha_p), beta + nn.functional.softplus(alpha_n)
    curve = torch.where(x > 0, above * x * x, (torch.expm1(torch.minimum(x, eps)) - x) * below)
    return curve + beta * x
