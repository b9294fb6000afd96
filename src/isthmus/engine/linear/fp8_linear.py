"""Linear layers with FP8 matmuls; weights, activations and accumulators keep their dtype.

Scaling is per tensor (tensorwise) or per row (rowwise), from the current largest element ("current scaling"). Dtypes
are those of arXiv 2209.05433 (e4m3 forward, e5m2 for gradients), scales those of torchao and TransformerEngine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
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
    scale: Tensor
    """Its inverse, before it was rounded."""


@compiled_on_gpu
def quantize(matrix: Tensor, dtype: torch.dtype, scaling: Scaling) -> Quantized:
    """Scale ``matrix`` [..., rows, n] to the range of the dtype and round.

    The scale of zeros is one; a non-finite element makes all elements with the same scale NaN.
    """
    scale = _scale(matrix, dtype, None if scaling == "tensorwise" else -1)
    return Quantized(_rounded(matrix, scale, dtype), scale.reciprocal(), scale)


@compiled_on_gpu
def quantize_columns(matrix: Tensor, dtype: torch.dtype, scaling: Scaling, scale: Tensor | None = None) -> Quantized:
    """:func:`quantize` the transpose of ``matrix`` [n, rows], with n zero-padded to a multiple of ``ALIGNMENT``.

    Tensorwise, ``scale`` is that of :func:`quantize`, which saves a read of the matrix.
    """
    if scale is None:
        scale = _scale(matrix, dtype, None if scaling == "tensorwise" else 0).t()
    return Quantized(_rounded(_padded_transpose(matrix), scale, dtype), scale.reciprocal(), scale)


@compiled_on_gpu
def quantize_both(matrix: Tensor, dtype: torch.dtype, scaling: Scaling) -> tuple[Quantized, Quantized]:
    """:func:`quantize` and :func:`quantize_columns`; tensorwise they have the same scale."""
    scale = _scale(matrix, dtype, None if scaling == "tensorwise" else 1)
    column_scale = scale if scaling == "tensorwise" else _scale(matrix, dtype, 0).t()
    columns = _rounded(_padded_transpose(matrix), column_scale, dtype)
    rows = Quantized(_rounded(matrix, scale, dtype), scale.reciprocal(), scale)
    return rows, Quantized(columns, column_scale.reciprocal(), column_scale)


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


class _Step:
    """What FP8 layers know about the micro batches of a step, in which weights do not change."""

    def __init__(self, *, keeps_weights: bool, gradients_are_zero: bool) -> None:
        self.keeps_weights, self.gradients_are_zero = keeps_weights, gradients_are_zero
        self.quantized: dict[tuple[int, Hashable], tuple[Tensor, Quantized]] = {}
        """Weights and their quantized copies, by the identity of the weight and a layout, which linear layers name by
        whether it is that of its columns."""
        self.with_gradient: set[int] = set()
        """Identities of the weights whose ``main_grad`` has a gradient."""

    def is_first_gradient(self, weight: Tensor) -> bool:
        """Whether ``main_grad`` is zero. The next call for this weight returns False."""
        is_first = self.gradients_are_zero and id(weight) not in self.with_gradient
        self.with_gradient.add(id(weight))
        return is_first


_step = _Step(keeps_weights=False, gradients_are_zero=False)


@contextlib.contextmanager
def fp8_step(*, keeps_weights: bool, gradients_are_zero: bool) -> Iterator[None]:
    """The micro batches of a step.

    ``keeps_weights`` keeps quantized weights until its end: 2 bytes per element. ``gradients_are_zero`` is whether
    ``main_grad`` of all weights is zero at its start.
    """
    global _step
    before = _step
    _step = _Step(keeps_weights=keeps_weights, gradients_are_zero=gradients_are_zero)
    try:
        yield
    finally:
        _step = before


def _quantized_weight(weight: Tensor, recipe: Fp8Recipe, *, columns: bool, both: bool = False) -> Quantized:
    """``both``: the other layout is needed, too, and is quantized in the same kernels if it can be kept."""
    # Detached: compiled for any number of rows, like the activations.
    matrix, kind = weight.detach(), (recipe.forward, recipe.scaling)
    if both and _step.keeps_weights and (id(weight), columns) not in _step.quantized:
        for layout, quantized in zip((False, True), quantize_both(matrix, *kind), strict=True):
            _step.quantized[id(weight), layout] = weight, quantized
    return kept_in_step(weight, columns, lambda: (quantize_columns if columns else quantize)(matrix, *kind))


def kept_in_step(weight: Tensor, layout: Hashable, compute: Callable[[], Quantized]) -> Quantized:
    """The quantized weight in a layout; computed once if the step keeps weights."""
    key = id(weight), layout
    if key in _step.quantized:
        return _step.quantized[key][1]
    quantized = compute()
    if _step.keeps_weights:
        _step.quantized[key] = weight, quantized
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


def scaled_mm_into(out: Tensor, a: Quantized, b: Quantized) -> None:
    """Overwrite a float32 ``out`` by the tensorwise matmul; its rows are aligned as those of ``b``."""
    torch._scaled_mm(a.values, b.values.t(), a.inverse_scale, b.inverse_scale, out_dtype=out.dtype, out=out)


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
                result = torch.full_like(expected, torch.nan, dtype=dtype)
                if dtype == torch.float32:
                    scaled_mm_into(result, a, b)
                else:
                    result = scaled_mm(a, b, dtype, fast=False)
            except RuntimeError as reason:
                raise UsageError(f"{what} fails on this GPU ({str(reason).strip()}). Use {instead}.") from reason
            error = float((result.float() - expected).norm() / expected.norm())
            if not error < MAX_KERNEL_ERROR:
                raise UsageError(f"{what} is wrong by {error:.0%} on this GPU. Use {instead}.")


class _Fp8Linear(torch.autograd.Function):
    """``x @ weight.T`` with tensor-parallel communication; saves ``x`` in its own dtype, if the weight is trained."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, recipe: Fp8Recipe, exchange: InputExchange, has_backward: bool
    ) -> Tensor:
        ctx.weight = weight  # not saved: a hook on saved tensors would return it without its main_grad
        ctx.recipe, ctx.exchange = recipe, exchange
        gathered = exchange.gather(x)
        tokens = quantize(gathered.flatten(0, -2), recipe.forward, recipe.scaling)
        scale = tokens.scale if recipe.scaling == "tensorwise" else None
        ctx.save_for_backward(*((x, scale) if weight.requires_grad else (None, None)))
        rows = _quantized_weight(weight, recipe, columns=False, both=has_backward)
        return scaled_matmul(tokens, rows, x.dtype, fast=True).view(*gathered.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, scale), weight, recipe, exchange = ctx.saved_tensors, ctx.weight, ctx.recipe, ctx.exchange
        grad, kind = grads[0].flatten(0, -2), (recipe.backward, recipe.scaling)
        gathered, wait_for_input = (NO_EXCHANGE if x is None else exchange).start_gather(x)
        tokens, outputs = (quantize(grad, *kind), None) if x is None else quantize_both(grad, *kind)
        columns = _quantized_weight(weight, recipe, columns=True)
        grad_whole = scaled_matmul(tokens, columns, grad.dtype, fast=False).view(*grads[0].shape[:-1], -1)
        wait_for_input()
        grad_x, wait_for_sum = exchange.start_sum(grad_whole)
        grad_weight = None if outputs is None else _weight_gradient(weight, recipe, gathered, scale, outputs)
        wait_for_sum()
        return grad_x, grad_weight, None, None, None


def _weight_gradient(
    weight: Any, recipe: Fp8Recipe, x: Tensor, scale: Tensor | None, outputs: Quantized
) -> Tensor | None:
    """Add it to ``main_grad``, or return it if there is none.

    ``scale`` is that of the input ``x``, ``outputs`` are the columns of the output's gradient.
    """
    inputs = quantize_columns(x.flatten(0, -2), recipe.forward, recipe.scaling, scale)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return scaled_matmul(outputs, inputs, x.dtype, fast=False)
    weight.grad_added_to_main_grad = True
    dtype, is_first = _gradient_dtype(recipe, main_grad.dtype, x.dtype), _step.is_first_gradient(weight)
    # The kernel wants aligned rows in its output; DDP buffers without a sharded optimizer do not align parameters.
    if is_first and dtype == torch.float32 and main_grad.is_cuda and main_grad.data_ptr() % ALIGNMENT == 0:
        scaled_mm_into(main_grad, outputs, inputs)
        return None
    gradient = scaled_matmul(outputs, inputs, dtype, fast=False)
    if is_first:
        main_grad.copy_(gradient)
    else:
        main_grad.add_(gradient)
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
    has_backward = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _Fp8Linear.apply(x, weight, recipe, exchange, has_backward)
