"""Linear layers with FP8 matmuls; weights, activations and accumulators keep their dtype.

Scaling is per tensor (tensorwise) or per row (rowwise), from the current largest element ("current scaling"). Dtypes
are those of arXiv 2209.05433 (e4m3 forward, e5m2 for gradients), scales those of torchao and TransformerEngine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from isthmus.engine.compiled import compiled_on_gpu
from isthmus.engine.linear.input_exchange import NO_EXCHANGE, InputExchange
from isthmus.errors import UsageError
from isthmus.platforms.torch_features import SCALED_MM

ALIGNMENT = 16
"""The hardware requires widths that are multiples of it; the sum over tokens is zero-padded."""
LARGEST_SCALE = 2.0**126
"""Its inverse is the smallest normal float32."""
MAX_KERNEL_ERROR = 0.01
"""Relative; rounding to bfloat16 is below it."""
Scaling = Literal["tensorwise", "rowwise"]


@dataclass(frozen=True, slots=True)
class Fp8Recipe:
    scaling: Scaling
    forward: torch.dtype
    """e4m3, for activations and weights."""
    backward: torch.dtype
    """Dtype of the gradient of a layer's output."""


class Quantized(NamedTuple):
    """A quantized matrix; a matmul reduces over its rows' elements."""

    values: Tensor
    """FP8 [rows, n], contiguous."""
    inverse_scale: Tensor
    """float32 [] or [rows, 1]; the matrix is ``values * inverse_scale``."""


@compiled_on_gpu
def quantize(matrix: Tensor, dtype: torch.dtype, scaling: Scaling) -> Quantized:
    """Scale ``matrix`` [rows, n] to the range of the dtype and round.

    The scale of zeros is one; a non-finite element makes all elements with the same scale NaN.
    """
    scale = _scale(matrix, dtype, None if scaling == "tensorwise" else 1)
    return Quantized(_rounded(matrix, scale, dtype), scale.reciprocal())


@compiled_on_gpu
def quantize_columns(matrix: Tensor, dtype: torch.dtype, scaling: Scaling) -> Quantized:
    """:func:`quantize` the transpose of ``matrix`` [n, rows], with n zero-padded to a multiple of ``ALIGNMENT``."""
    scale = _scale(matrix, dtype, None if scaling == "tensorwise" else 0).t()
    return Quantized(_rounded(_padded_transpose(matrix), scale, dtype), scale.reciprocal())


@compiled_on_gpu
def quantize_both(matrix: Tensor, dtype: torch.dtype, scaling: Scaling) -> tuple[Quantized, Quantized]:
    """:func:`quantize` and :func:`quantize_columns`; tensorwise they have the same scale."""
    scale = _scale(matrix, dtype, None if scaling == "tensorwise" else 1)
    column_scale = scale if scaling == "tensorwise" else _scale(matrix, dtype, 0).t()
    columns = _rounded(_padded_transpose(matrix), column_scale, dtype)
    return Quantized(_rounded(matrix, scale, dtype), scale.reciprocal()), Quantized(columns, column_scale.reciprocal())


def _scale(matrix: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
    """float32 [], or [rows, 1] or [1, n] if the maximum is over ``dim``."""
    amax = (matrix.abs().amax() if dim is None else matrix.abs().amax(dim, keepdim=True)).float()
    return torch.where(amax == 0, 1.0, (torch.finfo(dtype).max / amax).clamp(max=LARGEST_SCALE))


def _rounded(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # The scale is rounded, and a conversion beyond the range gives NaN: hence the clamp.
    largest = torch.finfo(dtype).max
    return (matrix.float() * scale).clamp(-largest, largest).to(dtype).contiguous()


def _padded_transpose(matrix: Tensor) -> Tensor:
    # Not -size % ALIGNMENT: in compiled code torch 2.6 rounds quotients of negative sizes to zero.
    padded = (matrix.size(0) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    return functional.pad(matrix.t(), (0, padded - matrix.size(0)))


_quantized_weights: dict[tuple[int, bool], tuple[Tensor, Quantized]] | None = None
"""Weights and their quantized copies, by the identity of the weight and whether they are its columns."""


@contextlib.contextmanager
def quantize_weights_once(enabled: bool) -> Iterator[None]:
    """Keep quantized weights until the end of the block, in which weights do not change: 2 bytes per element."""
    global _quantized_weights
    _quantized_weights = {} if enabled else None
    try:
        yield
    finally:
        _quantized_weights = None


def _quantized_weight(weight: Tensor, recipe: Fp8Recipe, *, columns: bool) -> Quantized:
    key = id(weight), columns
    if _quantized_weights is not None and key in _quantized_weights:
        return _quantized_weights[key][1]
    # Detached: compiled for any number of rows, like the activations.
    quantized = (quantize_columns if columns else quantize)(weight.detach(), recipe.forward, recipe.scaling)
    if _quantized_weights is not None:
        _quantized_weights[key] = weight, quantized
    return quantized


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


def check_kernels(recipe: Fp8Recipe, device: torch.device) -> None:
    """Run a small matmul of each kind on a GPU.

    Raises UsageError if torch cannot run it on this GPU, or the result is wrong.
    """
    elements = torch.arange(64 * 32, device=device).view(64, 32)
    for first in (recipe.forward, recipe.backward):
        a, b = (
            quantize(matrix, dtype, recipe.scaling)
            for matrix, dtype in ((elements.sin(), first), (elements[:48].cos(), recipe.forward))
        )
        expected = emulated_scaled_mm(a, b, torch.float32)
        what = f"train.precision=fp8 cannot be used: {recipe.scaling} scaled_mm of {first} and {recipe.forward}"
        instead = "train.precision=bf16" if first == recipe.forward else "train.fp8_format=e4m3"
        for dtype in (torch.bfloat16, _gradient_dtype(recipe, torch.float32, torch.bfloat16)):
            try:
                result = scaled_mm(a, b, dtype, fast=False)
            except RuntimeError as reason:
                raise UsageError(f"{what} fails on this GPU ({str(reason).strip()}). Use {instead}.") from reason
            error = float((result.float() - expected).norm() / expected.norm())
            if not error < MAX_KERNEL_ERROR:
                raise UsageError(f"{what} is wrong by {error:.0%} on this GPU. Use {instead}.")


class _Fp8Linear(torch.autograd.Function):
    """``x @ weight.T`` with tensor-parallel communication; saves ``x`` in its own dtype, if the weight is trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Fp8Recipe, exchange: InputExchange) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight = weight  # not saved: a hook on saved tensors would return it without its main_grad
        ctx.recipe, ctx.exchange = recipe, exchange
        gathered = exchange.gather(x)
        tokens = quantize(gathered.flatten(0, -2), recipe.forward, recipe.scaling)
        rows = _quantized_weight(weight, recipe, columns=False)
        return scaled_matmul(tokens, rows, x.dtype, fast=True).view(*gathered.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight, recipe, exchange = ctx.saved_tensors, ctx.weight, ctx.recipe, ctx.exchange
        grad, kind = grads[0].flatten(0, -2), (recipe.backward, recipe.scaling)
        gathered, wait_for_input = (NO_EXCHANGE if x is None else exchange).start_gather(x)
        tokens, outputs = (quantize(grad, *kind), None) if x is None else quantize_both(grad, *kind)
        columns = _quantized_weight(weight, recipe, columns=True)
        grad_whole = scaled_matmul(tokens, columns, grad.dtype, fast=False).view(*grads[0].shape[:-1], -1)
        wait_for_input()
        grad_x, wait_for_sum = exchange.start_sum(grad_whole)
        grad_weight = None if outputs is None else _weight_gradient(ctx, gathered, outputs)
        wait_for_sum()
        return grad_x, grad_weight, None, None


def _weight_gradient(ctx: Any, x: Tensor, outputs: Quantized) -> Tensor | None:
    """Add it to ``main_grad``, or return it if there is none. ``outputs`` are the columns of the output's gradient."""
    weight, recipe = ctx.weight, ctx.recipe
    inputs = quantize_columns(x.flatten(0, -2), recipe.forward, recipe.scaling)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return scaled_matmul(outputs, inputs, x.dtype, fast=False)
    main_grad.add_(scaled_matmul(outputs, inputs, _gradient_dtype(recipe, main_grad.dtype, x.dtype), fast=False))
    weight.grad_added_to_main_grad = True
    return None


def _gradient_dtype(recipe: Fp8Recipe, main_grad: torch.dtype, activations: torch.dtype) -> torch.dtype:
    """Dtype of weight gradients before they are added to ``main_grad``: rowwise kernels return bfloat16 only."""
    return main_grad if recipe.scaling == "tensorwise" else activations


def fits(weight: Tensor) -> bool:
    return weight.size(0) % ALIGNMENT == 0 and weight.size(1) % ALIGNMENT == 0


def fp8_linear(x: Tensor, weight: Tensor, recipe: Fp8Recipe, exchange: InputExchange = NO_EXCHANGE) -> Tensor:
    """``x @ weight.T`` and its gradients as FP8 matmuls.

    ``x`` is [..., n] with at least two dims, ``weight`` [N, n] passes :func:`fits`.
    """
    return _Fp8Linear.apply(x, weight, recipe, exchange)
