"""Linear layers with FP8 matmuls; weights, activations and accumulators keep their dtype.

Dtypes are those of arXiv 2209.05433 (e4m3 forward, e5m2 for gradients), scales those of torchao and TransformerEngine.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from isthmus.engine.linear.fp8_blocks import ROW_BLOCKS, SQUARE_BLOCKS, Blocks, swizzled_scales
from isthmus.engine.linear.fp8_quantization import (
    ALIGNMENT,
    Quantized,
    Scaling,
    dequantize,
    quantize,
    quantize_both,
    quantize_columns,
    width_multiple,
)
from isthmus.engine.linear.input_exchange import NO_EXCHANGE, InputExchange
from isthmus.errors import UsageError
from isthmus.platforms.torch_features import FLOAT8_E8M0, SCALED_MM

MAX_KERNEL_ERROR = 0.01
"""Relative; rounding to bfloat16 is below it."""


@dataclass(frozen=True, slots=True)
class Fp8Recipe:
    scaling: Scaling
    """That of activations and gradients."""
    forward: torch.dtype
    """e4m3, for activations and weights."""
    backward: torch.dtype
    """Dtype of the gradient of a layer's output."""

    @property
    def weight_scaling(self) -> Scaling:
        return SQUARE_BLOCKS if self.scaling == ROW_BLOCKS else self.scaling

    @property
    def multiple(self) -> int:
        return width_multiple(self.scaling)


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
    matrix, kind = weight.detach(), (recipe.forward, recipe.weight_scaling)
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
    if isinstance(a.scaling, Blocks):
        return (dequantize(a) @ dequantize(b).t()).to(dtype)
    return (a.values.float() @ b.values.float().t() * a.inverse_scale * b.inverse_scale.t()).to(dtype)


def scaled_mm(a: Quantized, b: Quantized, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """GPU kernel; widths are multiples of 16, and rowwise scaling returns bfloat16.

    Kernels of blocks sum the products of a block with less than float32 precision, and the blocks in float32.
    """
    operands = a.values, b.values.t()
    if isinstance(a.scaling, Blocks):
        (scale_a, kind_a, swizzle_a), (scale_b, kind_b, swizzle_b) = _block_operand(a), _block_operand(b)
        return SCALED_MM(*operands, scale_a, kind_a, scale_b, kind_b, swizzle_a, swizzle_b, output_dtype=dtype)  # type: ignore[no-any-return]
    scale = b.inverse_scale.t().contiguous()
    if SCALED_MM is None:
        return torch._scaled_mm(*operands, a.inverse_scale, scale, out_dtype=dtype, use_fast_accum=fast)
    kind = functional.ScalingType.RowWise if a.scaling == "rowwise" else functional.ScalingType.TensorWise
    return SCALED_MM(*operands, a.inverse_scale, kind, scale, kind, output_dtype=dtype, use_fast_accum=fast)


def _block_operand(matrix: Quantized) -> tuple[Tensor, Any, Any]:
    """Scales as the kernel requires them, and how it has to read them."""
    blocks, kinds, swizzles = matrix.scaling, functional.ScalingType, functional.SwizzleType
    if isinstance(blocks, Blocks) and blocks.is_mx:
        assert FLOAT8_E8M0 is not None  # check_precision refuses the run
        scale = swizzled_scales(matrix.inverse_scale) if blocks.swizzled else matrix.inverse_scale
        swizzle = swizzles.SWIZZLE_32_4_4 if blocks.swizzled else swizzles.NO_SWIZZLE
        return scale.view(FLOAT8_E8M0), kinds.BlockWise1x32, swizzle
    if blocks == ROW_BLOCKS:
        return matrix.inverse_scale, kinds.BlockWise1x128, swizzles.NO_SWIZZLE
    return matrix.inverse_scale.t(), kinds.BlockWise128x128, swizzles.NO_SWIZZLE


def scaled_mm_into(out: Tensor, a: Quantized, b: Quantized) -> None:
    """Overwrite a float32 ``out`` by the tensorwise or blockwise matmul; its rows are aligned as those of ``b``."""
    torch._scaled_mm(a.values, b.values.t(), a.inverse_scale, b.inverse_scale.t(), out_dtype=out.dtype, out=out)


def check_kernels(recipe: Fp8Recipe, device: torch.device) -> None:
    """Run a small matmul of each kind on a GPU.

    Raises UsageError if torch cannot run it on this GPU, or the result is wrong.
    """
    rows, width = 4 * recipe.multiple, 2 * recipe.multiple
    elements = torch.arange(rows * width, device=device).view(rows, width)
    # Forward pass and input gradient, then weight gradient.
    others = (
        (recipe.weight_scaling, torch.bfloat16),
        (recipe.scaling, _gradient_dtype(recipe, torch.float32, torch.bfloat16)),
    )
    for first, (scaling, dtype) in itertools.product((recipe.forward, recipe.backward), others):
        a = quantize(elements.sin(), first, recipe.scaling)
        b = quantize(elements[: 3 * recipe.multiple].cos(), recipe.forward, scaling)
        expected = emulated_scaled_mm(a, b, torch.float32)
        what = f"train.precision=fp8 cannot be used: {recipe.scaling} scaled_mm of {first} and {recipe.forward}"
        instead = "train.fp8_format=e4m3" if first != recipe.forward else "train.precision=bf16"
        if isinstance(recipe.scaling, Blocks):
            instead += ", or train.fp8_scaling=tensorwise"
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
        ctx.save_for_backward(*((x, tokens.scale) if weight.requires_grad else (None, None)))
        rows = _quantized_weight(weight, recipe, columns=False, both=has_backward)
        return _without_padding(scaled_matmul(tokens, rows, x.dtype, fast=True), gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, scale), weight, recipe, exchange = ctx.saved_tensors, ctx.weight, ctx.recipe, ctx.exchange
        grad, kind = grads[0].flatten(0, -2), (recipe.backward, recipe.scaling)
        gathered, wait_for_input = (NO_EXCHANGE if x is None else exchange).start_gather(x)
        tokens, outputs = (quantize(grad, *kind), None) if x is None else quantize_both(grad, *kind)
        columns = _quantized_weight(weight, recipe, columns=True)
        grad_whole = _without_padding(scaled_matmul(tokens, columns, grad.dtype, fast=False), grads[0])
        wait_for_input()
        grad_x, wait_for_sum = exchange.start_sum(grad_whole)
        grad_weight = None if outputs is None else _weight_gradient(weight, recipe, gathered, scale, outputs)
        wait_for_sum()
        return grad_x, grad_weight, None, None, None


def _without_padding(result: Tensor, tokens: Tensor) -> Tensor:
    """[..., N] of the ``tokens`` [..., n] from the rows of a matmul, of which blocks may have more."""
    return result[: tokens.shape[:-1].numel()].view(*tokens.shape[:-1], -1)


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
    """Dtype of weight gradients before they are added to ``main_grad``: some kernels return bfloat16 only."""
    return main_grad if recipe.scaling in ("tensorwise", ROW_BLOCKS) else activations


def fits(weight: Tensor, multiple: int = ALIGNMENT) -> bool:
    return weight.size(0) % multiple == 0 and weight.size(1) % multiple == 0


def fp8_linear(x: Tensor, weight: Tensor, recipe: Fp8Recipe, exchange: InputExchange = NO_EXCHANGE) -> Tensor:
    """``x @ weight.T`` and its gradients as FP8 matmuls.

    ``x`` is [..., n] with at least two dims, ``weight`` [N, n] passes :func:`fits` with the multiple of the recipe.
    """
    has_backward = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _Fp8Linear.apply(x, weight, recipe, exchange, has_backward)
