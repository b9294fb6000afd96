"""Quantization of matrices to FP8: their rows, or their columns as the rows of the transpose.

Scaling is per tensor (tensorwise), per row (rowwise) or per block, from the largest element ("current scaling"). Each
function is one compiled region on a GPU.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from isthmus.engine.compiled import compiled_on_gpu
from isthmus.engine.linear.fp8_blocks import (
    ROW_BLOCKS,
    Blocks,
    block_scales,
    multiple_of,
    quantize_blocks,
    rounded,
    scale_of,
)
from isthmus.platforms.base import Platform
from isthmus.platforms.torch_features import FLOAT8_E8M0, SCALED_MM

ALIGNMENT = 16
"""The hardware requires widths that are multiples of it; the sum over tokens is zero-padded."""
Scaling = Literal["tensorwise", "rowwise"] | Blocks
ScalingName = Literal["tensorwise", "rowwise", "blockwise", "mxfp8"]


def named_scaling(name: ScalingName, *, swizzled: bool = False) -> Scaling:
    """That of activations with ``train.fp8_scaling``; ``swizzled`` is a property of the platform."""
    if name in ("tensorwise", "rowwise"):
        return name
    return ROW_BLOCKS if name == "blockwise" else Blocks(1, 32, is_mx=True, swizzled=swizzled)


def unsupported_scaling(name: ScalingName, platform: Platform) -> str | None:
    """Why a platform that supports FP8, or emulates it, cannot use this ``train.fp8_scaling``; None: it can."""
    if name == "mxfp8" and FLOAT8_E8M0 is None:
        return f"torch {torch.__version__} has no float8_e8m0fnu"
    if name in ("tensorwise", "rowwise") or platform.device_type == "cpu":
        return None
    if SCALED_MM is None:
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm"
    supported, reason = platform.supports(name)
    return None if supported else reason


def width_multiple(scaling: Scaling) -> int:
    """Number by which both widths of a layer are divisible."""
    return scaling.elements if isinstance(scaling, Blocks) else ALIGNMENT


class Quantized(NamedTuple):
    """A quantized matrix; a matmul reduces over its rows' elements."""

    values: Tensor
    """FP8 [rows, n], contiguous; with blocks zero-padded to whole ones."""
    inverse_scale: Tensor
    """float32 [] or [rows, 1]; the matrix is ``values * inverse_scale``. Of blocks as :func:`quantize_blocks` makes
    them."""
    scaling: Scaling
    scale: Tensor | None = None
    """Tensorwise, its inverse, before it was rounded."""


@compiled_on_gpu
def quantize(matrix: Tensor, dtype: torch.dtype, scaling: Scaling) -> Quantized:
    """Scale ``matrix`` [..., rows, n], with blocks [rows, n], to the range of the dtype and round.

    The scale of zeros is one; a non-finite element makes all elements with the same scale NaN.
    """
    if isinstance(scaling, Blocks):
        return Quantized(*quantize_blocks(matrix, dtype, scaling), scaling)
    scale = _scale(matrix, dtype, None if scaling == "tensorwise" else -1)
    return _quantized(matrix, scale, dtype, scaling)


@compiled_on_gpu
def quantize_columns(matrix: Tensor, dtype: torch.dtype, scaling: Scaling, scale: Tensor | None = None) -> Quantized:
    """:func:`quantize` the transpose of ``matrix`` [n, rows], with n zero-padded to a multiple of ``ALIGNMENT``.

    Tensorwise, ``scale`` is that of :func:`quantize`, which saves a read of the matrix.
    """
    if isinstance(scaling, Blocks):
        return Quantized(*quantize_blocks(matrix.t(), dtype, scaling), scaling)
    if scale is None:
        scale = _scale(matrix, dtype, None if scaling == "tensorwise" else 0).t()
    return _quantized(_padded_transpose(matrix), scale, dtype, scaling)


@compiled_on_gpu
def quantize_both(matrix: Tensor, dtype: torch.dtype, scaling: Scaling) -> tuple[Quantized, Quantized]:
    """:func:`quantize` and :func:`quantize_columns`; tensorwise they have the same scale."""
    if isinstance(scaling, Blocks):
        by_row, by_column = (quantize_blocks(layout, dtype, scaling) for layout in (matrix, matrix.t()))
        return Quantized(*by_row, scaling), Quantized(*by_column, scaling)
    scale = _scale(matrix, dtype, None if scaling == "tensorwise" else 1)
    column_scale = scale if scaling == "tensorwise" else _scale(matrix, dtype, 0).t()
    columns = _quantized(_padded_transpose(matrix), column_scale, dtype, scaling)
    return _quantized(matrix, scale, dtype, scaling), columns


def dequantize(quantized: Quantized) -> Tensor:
    """The float32 matrix."""
    values, scale, scaling, _ = quantized
    if isinstance(scaling, Blocks):
        scale = block_scales(values, scale, scaling)
    return values.float() * scale


def _quantized(matrix: Tensor, scale: Tensor, dtype: torch.dtype, scaling: Scaling) -> Quantized:
    multiplier = scale if scaling == "tensorwise" else None
    return Quantized(rounded(matrix, scale, dtype), scale.reciprocal(), scaling, multiplier)


def _scale(matrix: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
    """float32 [], or [rows, 1] or [1, n] if the maximum is over ``dim``."""
    amax = matrix.abs().amax() if dim is None else matrix.abs().amax(dim, keepdim=True)
    return scale_of(amax.float(), dtype)


def _padded_transpose(matrix: Tensor) -> Tensor:
    return functional.pad(matrix.t(), (0, multiple_of(matrix.size(0), ALIGNMENT) - matrix.size(0)))
