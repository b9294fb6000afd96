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

from isthmus.engine.compiled import compiled_on_gpu, compiles


class _Norm(nn.Module):
    subtracts_mean = False

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = False,
        weight: bool = True,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.shape = (hidden_size,)
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype)) if weight else None
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype)) if bias else None
        for parameter in self.parameters():
            # finalize_model_grads reads it: each rank has a part of the sequence.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def _apply_function(self, x: Tensor, residual: Tensor | None, *, with_input: bool) -> Any:
        settings = (self.eps, self.zero_centered, self.subtracts_mean)
        if not torch.is_grad_enabled():  # the same bits as in training
            total, normed, *_ = _normalized(x, residual, self.weight, self.bias, *settings)
            total = x if with_input else total
            return normed if total is None else (total, normed)
        return _NormFunction.apply(x, residual, self.weight, self.bias, settings, with_input)


def _gain(weight: Tensor | None, zero_centered: bool) -> Tensor | None:
    """``1 + weight`` is computed in float32, which does not round it."""
    return weight.float() + 1 if zero_centered and weight is not None else weight


class _NormFunction(torch.autograd.Function):
    """Saves its input, or the sum of the inputs, and one number per row (LayerNorm: two).

    torch's RMSNorm on a CPU is six operations that each save their input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        settings: tuple[Any, ...],
        with_input: bool,
    ) -> Any:
        total, normed, *stats = _normalized(x, residual, weight, bias, *settings)
        ctx.save_for_backward(x if total is None else total, weight, bias, *stats)
        # Not only saved: a hook on saved tensors would return them without their main_grad.
        ctx.parameters, ctx.settings, ctx.adds = (weight, bias), settings, residual is not None
        total = x if with_input else total
        return normed if total is None else (total, normed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_sum = grads[0] if len(grads) == 2 else None
        trained = ctx.needs_input_grad[2:4]
        settings = (*ctx.settings, trained[0], *map(gradient_buffer, ctx.parameters, trained))
        grad_x, grad_weight, grad_bias = _norm_backward(grads[-1], grad_sum, *ctx.saved_tensors, *settings)
        return grad_x, grad_x if ctx.adds else None, grad_weight, grad_bias, None, None


@compiled_on_gpu
def _normalized(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    mean: bool,
) -> tuple[Tensor | None, ...]:
    """``x + residual`` or None, the norm, and its statistics; ``mean``: LayerNorm."""
    total = None if residual is None else x + residual
    x = x if total is None else total
    if mean:
        gain = _gain(weight, zero_centered)
        return total, *torch.native_layer_norm(x, x.shape[-1:], _as(gain, x.dtype), bias, eps)
    return total, *rms_normalized(x, weight, eps, zero_centered=zero_centered)


def rms_normalized(x: Tensor, weight: Tensor | None, eps: float, *, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """The RMSNorm [..., H] and its factors [..., 1] in float32; without autograd."""
    gain = _gain(weight, zero_centered)
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.size(-1))
    scale = mean_square.add_(eps).rsqrt_()
    normed = wide * scale
    normed = normed if gain is None else normed.mul_(gain)
    return normed if wide is x else normed.to(x.dtype), scale


def _as(gain: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if gain is None else gain.to(dtype)


@compiled_on_gpu
def _norm_backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the inputs, of the weight and of the bias.

    ``rest`` is the statistics and settings of :func:`_normalized`, whether the weight is trained, and the
    :func:`gradient_buffer` of weight and bias. A gradient is added to its buffer, or returned if there is none.
    """
    *stats, _eps, zero_centered, mean, trained, weight_buffer, bias_buffer = rest
    if mean:
        gain = _gain(weight, zero_centered)
        output_mask = [True, weight is not None, bias is not None]
        grad_x, grad_gain, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad, x, x.shape[-1:], *stats, _as(gain, x.dtype), bias, output_mask
        )
        grad_weight = grad_gain if weight is not None else None
    else:
        grad_bias = None
        grad_x, grad_weight = rms_norm_backward(grad, x, weight, *stats, zero_centered=zero_centered, trained=trained)
    grad_weight = add_or_return(grad_weight, weight, weight_buffer)
    grad_bias = add_or_return(grad_bias, bias, bias_buffer)
    return grad_x if grad_sum is None else grad_x + grad_sum, grad_weight, grad_bias


def gradient_buffer(parameter: Any, trained: bool) -> Tensor | None:
    """The float32 ``main_grad`` of a trained parameter, which the caller adds a gradient to; None without one."""
    buffer: Tensor | None = getattr(parameter, "main_grad", None) if trained else None
    if buffer is None or buffer.dtype != torch.float32:
        return None
    parameter.grad_added_to_main_grad = True
    return buffer


def add_or_return(grad: Tensor | None, parameter: Tensor | None, buffer: Tensor | None) -> Tensor | None:
    """Add a gradient to the buffer of its parameter and return None; without a buffer return it for autograd."""
    if grad is None or parameter is None:
        return None
    if buffer is None:
        return grad.to(parameter.dtype)
    buffer.add_(grad)
    return None


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, scale: Tensor, *, zero_centered: bool, trained: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the input and, not rounded, of a ``trained`` weight.

    ``scale`` are the factors of :func:`rms_normalized`.
    """
    gain = _gain(weight, zero_centered)
    wide = grad.to(scale.dtype)
    normed = x.to(scale.dtype) * scale
    grad_weight = None
    if trained and weight is not None:
        grad_weight = (normed * wide).flatten(0, -2).sum(0)
    grad_normed = wide if gain is None else wide * gain
    along = torch.linalg.vecdot(normed, grad_normed).unsqueeze(-1).div_(x.size(-1))
    return normed.mul_(along).neg_().add_(grad_normed).mul_(scale).to(x.dtype), grad_weight


class RMSNorm(_Norm):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim (arXiv 1910.07467)."""

    def forward(self, x: Tensor, residual: Tensor | None = None, *, with_input: bool = False) -> Any:
        """The norm of ``x``; with a ``residual`` (x + residual, its norm); ``with_input`` (x, its norm).

        A layer that adds to ``x`` uses the ``x`` of the result: both of its gradients are then summed in one kernel.
        """
        if x.device.type == "cpu" or compiles(x):
            return self._apply_function(x, residual, with_input=with_input)
        if residual is not None:
            x = x + residual
        if self.zero_centered:
            gain = _gain(self.weight, self.zero_centered)
            normed = torch.rms_norm(x.float(), self.shape, gain, self.eps).to(x.dtype)
        else:
            normed = torch.rms_norm(x, self.shape, self.weight, self.eps)
        return (x, normed) if with_input or residual is not None else normed


def rms_norm_of_float32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The :class:`RMSNorm` of float32 ``x`` with a weight of any dtype, in float32; only ``x`` is saved."""
    normed: Tensor = _NormFunction.apply(x, None, weight, None, (eps, False, False), False)
    return normed


class LayerNorm(_Norm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dim (arXiv 1607.06450)."""

    subtracts_mean = True

    def forward(self, x: Tensor, residual: Tensor | None = None, *, with_input: bool = False) -> Any:
        """As in :class:`RMSNorm`."""
        return self._apply_function(x, residual, with_input=with_input)


class _HeadsNorm(_Norm):
    """A norm of queries or keys with the weights of all heads, [heads * D].

    Every rank has all weights and uses those of its heads; Megatron-Core sums their gradients. ``num_heads`` counts the
    heads of all ranks; with fewer heads than ranks, several ranks have the same head.
    """

    weight: nn.Parameter

    def __init__(
        self, config: TransformerConfig, num_heads: int, head_dim: int, eps: float, *, rank: int, ranks: int
    ) -> None:
        super().__init__(config, num_heads * head_dim, eps)
        self.copies = max(1, ranks // num_heads)
        width = num_heads * head_dim * self.copies // ranks
        self.ranks = ranks
        self.rank_rows = slice(rank // self.copies * width, (rank // self.copies + 1) * width)

    def rank_gain(self) -> Tensor:
        """The gain of this rank's channels."""
        gain = _gain(self.weight, self.zero_centered)
        assert gain is not None
        return gain[self.rank_rows]


class ProjectionNorm(_HeadsNorm):
    """RMSNorm over the channels of all heads, sharded over tp ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [T, ...] has this rank's channels."""
        wide = x.flatten(1).to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum(-1, keepdim=True)
        if self.ranks > 1:
            # The scale depends on all ranks' channels: forward and backward sum over the ranks.
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        scale = (squares / (self.copies * self.shape[0]) + self.eps).rsqrt()
        return (wide * scale * self.rank_gain()).to(x.dtype).view_as(x)


class EachHeadNorm(_HeadsNorm):
    """LayerNorm over the channels of each head, without biases; every head has its own weights."""

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [T, ..., D] has this rank's heads."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = torch.nn.functional.layer_norm(wide, x.shape[-1:], eps=self.eps)
        return (normed.flatten(1) * self.rank_gain()).to(x.dtype).view_as(x)
