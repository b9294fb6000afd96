"""Linear layers with FP8 matmuls; weights, activations and accumulators keep their dtype.

Scaling is per tensor (tensorwise) or per row (rowwise), from the current largest element ("current scaling"). Dtypes
are those of arXiv 2209.05433 (e4m3 forward, e5m2 for gradients), scales those of torchao and TransformerEngine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from isthmus.engine.parallel.tensor_parallel import NO_EXCHANGE, InputExchange
from isthmus.platforms.torch_features import SCALED_MM

ALIGNMENT = 16
"""The hardware requires widths that are multiples of it; the sum over tokens is zero-padded."""
LARGEST_SCALE = 2.0**126
"""Its inverse is the smallest normal float32."""


@dataclass(frozen=True, slots=True)
class Fp8Recipe:
    scaling: Literal["tensorwise", "rowwise"]
    forward: torch.dtype
    """e4m3, for activations and weights."""
    backward: torch.dtype
    """Of the gradient of a layer's output."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantized matrix; a matmul reduces over its rows' elements."""

    values: Tensor
    """FP8 [rows, n], contiguous."""
    inverse_scale: Tensor
    """float32 [] or [rows, 1]; the matrix is ``values * inverse_scale``."""


def quantize(matrix: Tensor, dtype: torch.dtype, scaling: str) -> Quantized:
    """Scale ``matrix`` [rows, n] to the range of the dtype and round.

    The scale of zeros is one; a non-finite element makes all elements with the same scale NaN.
    """
    largest = torch.finfo(dtype).max
    amax = matrix.abs().amax(1 if scaling == "rowwise" else (0, 1), keepdim=True).float()
    scale = torch.where(amax == 0, 1.0, (largest / amax).clamp(max=LARGEST_SCALE))
    # The scale is rounded, and a conversion beyond the range gives NaN: hence the clamp.
    values = (matrix.float() * scale).clamp(-largest, largest).to(dtype).contiguous()
    inverse = scale.reciprocal()
    return Quantized(values, inverse if scaling == "rowwise" else inverse.view(()))


def scaled_matmul(a: Quantized, b: Quantized, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """``a @ b.T`` of [M, n] (e4m3 or e5m2) and [N, n] (e4m3) as ``dtype``.

    ``fast`` allows accumulators below float32 precision, enough for forward passes but not for gradients.
    """
    return emulated_scaled_mm(a, b, dtype) if a.values.device.type == "cpu" else scaled_mm(a, b, dtype, fast=fast)


def emulated_scaled_mm(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Float32 matmul of the same rounded numbers on a CPU, for tests."""
    return (a.values.float() @ b.values.float().t() * a.inverse_scale * b.inverse_scale.t()).to(dtype)


def scaled_mm(a: Quantized, b: Quantized, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """GPU kernel; widths are multiples of 16, and rowwise scaling returns bfloat16."""
    operands, scale = (a.values, b.values.t()), b.inverse_scale.t().contiguous()
    if SCALED_MM is None:
        return torch._scaled_mm(*operands, a.inverse_scale, scale, out_dtype=dtype, use_fast_accum=fast)
    kind = functional.ScalingType.RowWise if a.inverse_scale.dim() else functional.ScalingType.TensorWise
    return SCALED_MM(*operands, a.inverse_scale, kind, scale, kind, output_dtype=dtype, use_fast_accum=fast)


def _padded(matrix: Tensor) -> Tensor:
    return functional.pad(matrix, (0, -matrix.size(1) % ALIGNMENT))


class _Fp8Linear(torch.autograd.Function):
    """``x @ weight.T`` with tensor-parallel communication; saves ``x`` in its own dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Fp8Recipe, exchange: InputExchange) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # not saved: a hook on saved tensors would return it without its main_grad
        ctx.recipe, ctx.exchange = recipe, exchange
        whole = exchange.gather(x)
        tokens = quantize(whole.flatten(0, -2), recipe.forward, recipe.scaling)
        rows = quantize(weight, recipe.forward, recipe.scaling)
        return scaled_matmul(tokens, rows, x.dtype, fast=True).view(*whole.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight, recipe, exchange = ctx.saved_tensors, ctx.weight, ctx.recipe, ctx.exchange
        grad = grads[0].flatten(0, -2)
        whole, wait_for_input = (exchange if weight.requires_grad else NO_EXCHANGE).start_gather(x)
        tokens = quantize(grad, recipe.backward, recipe.scaling)
        columns = quantize(weight.t(), recipe.forward, recipe.scaling)
        grad_whole = scaled_matmul(tokens, columns, x.dtype, fast=False).view(*grads[0].shape[:-1], -1)
        wait_for_input()
        grad_x, wait_for_sum = exchange.start_sum(grad_whole)
        grad_weight = _weight_gradient(ctx, whole, grad) if weight.requires_grad else None
        wait_for_sum()
        return grad_x, grad_weight, None, None


def _weight_gradient(ctx: Any, x: Tensor, grad: Tensor) -> Tensor | None:
    """Add it to ``main_grad``, or return it if there is none."""
    weight, recipe = ctx.weight, ctx.recipe
    outputs = quantize(_padded(grad.t()), recipe.backward, recipe.scaling)
    inputs = quantize(_padded(x.flatten(0, -2).t()), recipe.forward, recipe.scaling)
    found = scaled_matmul(outputs, inputs, x.dtype, fast=False)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return found
    main_grad.add_(found)
    weight.grad_added_to_main_grad = True
    return None


def fits(weight: Tensor) -> bool:
    return weight.size(0) % ALIGNMENT == 0 and weight.size(1) % ALIGNMENT == 0


def fp8_linear(x: Tensor, weight: Tensor, recipe: Fp8Recipe, exchange: InputExchange = NO_EXCHANGE) -> Tensor:
    """``x @ weight.T`` and its gradients as FP8 matmuls.

    ``x`` is [..., n] with at least two dims, ``weight`` [N, n] passes :func:`fits`.
    """
    return _Fp8Linear.apply(x, weight, recipe, exchange)
