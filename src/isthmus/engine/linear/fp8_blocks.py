"""Values and scales of a matrix that is quantized to FP8 in blocks.

Blockwise scaling is that of DeepSeek-V3 (arXiv 2412.19437, section 3.3): a float32 scale for 128 elements of a row of
activations and gradients, and for squares of 128 x 128 weights. MXFP8 is a format of the OCP Microscaling
specification: a power of two for 32 elements of a row, stored as e8m0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from isthmus.platforms.torch_features import FLOAT8_E8M0

LARGEST_SCALE = 2.0**126
"""Its inverse is the smallest normal float32."""
_NAN = 255
"""An e8m0 number."""


class Blocks(NamedTuple):
    """A block of a matrix, whose elements have one scale; matmuls reduce over the elements of rows."""

    rows: int
    elements: int
    """Elements of a row. Matrices are zero-padded to multiples of it in both dimensions."""
    is_mx: bool = False
    """Whether scales are powers of two in e8m0."""
    swizzled: bool = False
    """Whether kernels read e8m0 scales in the order of :func:`swizzled_scales`."""

    def __str__(self) -> str:
        return f"{self.rows}x{self.elements} {'e8m0' if self.is_mx else 'float32'}"


ROW_BLOCKS, SQUARE_BLOCKS = Blocks(1, 128), Blocks(128, 128)


def quantize_blocks(matrix: Tensor, dtype: torch.dtype, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """FP8 values of ``matrix`` [rows, n], and the scales by which they are multiplied, as the kernels read them.

    A non-finite element makes its block NaN. Scales are float32 [rows, n / 128] with contiguous columns; for squares
    float32 [rows / 128, n / 128], whose rows have space for a multiple of 4; for MXFP8 the bytes of e8m0
    [rows, n / 32].
    """
    blocks_of_rows = (
        _padded(matrix, blocks.elements).unflatten(1, (-1, blocks.elements)).unflatten(0, (-1, blocks.rows))
    )
    amax = blocks_of_rows.abs().amax((1, 3), keepdim=True).float()
    if blocks.is_mx:
        exponents = _exponents(amax, dtype)
        # Of NaN, 255, it is infinite, and does not matter.
        factor = ((254 - exponents) << 23).view(torch.float32)
        scales = exponents.to(torch.uint8).flatten(2).flatten(0, 1)
    else:
        factor = scale_of(amax, dtype)
        scales = factor.reciprocal().flatten(2).flatten(0, 1)
        if blocks.rows == 1:
            scales = scales.t().contiguous().t()
        else:
            scales = functional.pad(scales, (0, multiple_of(scales.size(1), 4) - scales.size(1)))
    return rounded(blocks_of_rows, factor, dtype).flatten(2).flatten(0, 1), scales


def block_scales(values: Tensor, scales: Tensor, blocks: Blocks) -> Tensor:
    """The float32 scale of each element of ``values``, from the scales of :func:`quantize_blocks`."""
    rows, columns = values.size(0) // blocks.rows, values.size(1) // blocks.elements
    if blocks.is_mx:
        assert FLOAT8_E8M0 is not None  # check_precision refuses the run
        scales = scales.view(FLOAT8_E8M0).float()
    scales = scales[:rows, :columns]
    return scales.repeat_interleave(blocks.rows, 0).repeat_interleave(blocks.elements, 1)


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale that maps ``amax`` to the largest number of the dtype; that of zeros is one."""
    return torch.where(amax == 0, 1.0, (torch.finfo(dtype).max / amax).clamp(max=LARGEST_SCALE))


def rounded(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # The scale is rounded, and a conversion beyond the range gives NaN: hence the clamp.
    largest = torch.finfo(dtype).max
    return (matrix.float() * scale).clamp(-largest, largest).to(dtype).contiguous()


def multiple_of(size: int, number: int) -> int:
    """``size``, rounded up to a multiple."""
    # Not size + -size % number: in compiled code torch 2.6 rounds quotients of negative sizes to zero.
    return (size + number - 1) // number * number


def _padded(matrix: Tensor, multiple: int) -> Tensor:
    rows, n = matrix.shape
    return functional.pad(matrix, (0, multiple_of(n, multiple) - n, 0, multiple_of(rows, multiple) - rows))


def _exponents(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """int32 e8m0 exponents, 127 for a scale of one: of the smallest power of two with which no element overflows.

    Computed from the bits of ``amax``: its exponent less that of the dtype's largest number, plus one if its mantissa
    is larger. The least is that of the smallest normal float32.
    """
    mantissa, exponent = math.frexp(torch.finfo(dtype).max)
    carry = 2**23 - 1 - int((2 * mantissa - 1) * 2**23)
    exponents = ((amax.view(torch.int32) + carry) >> 23) - (exponent - 1)
    return torch.where(amax.isfinite(), exponents.clamp(min=1), _NAN)


def swizzled_scales(scales: Tensor) -> Tensor:
    """[rows, columns] e8m0 scales in the order of NVIDIA's matrix cores: tiles of 128 x 4 with the rows 0, 32, 64, 96
    next to each other, as one dimension.

    Not in a compiled region: of a variable number of rows, inductor of torch 2.13 reads the first tile only.
    """
    rows, columns = (multiple_of(size, multiple) for size, multiple in zip(scales.shape, (128, 4), strict=True))
    padded = functional.pad(scales, (0, columns - scales.size(1), 0, rows - scales.size(0)))
    return padded.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).flatten()
