"""Quantized weights in Hugging Face folders: block formats and their dequantization."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from isthmus.errors import DataError, UsageError
from isthmus.hf.tensors.safetensors_format import Bounds

Index = tuple[slice, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """DeepSeek's FP8 (arXiv 2412.19437, section 3.3): ``X`` in E4M3, and one scale per block in ``X_scale_inv``.

    Codes are [..., R, C], scales [..., ceil(R / rows), ceil(C / cols)] in any float dtype; value = code * scale.
    """

    rows: int
    cols: int

    codes_suffix = ""
    scales_suffix = "_scale_inv"
    codes_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    split_axis = -2
    """Dimension along which a large tensor is split for dequantization."""

    def __str__(self) -> str:
        return f"FP8 in blocks of {self.rows}x{self.cols}"

    def matches(self, codes: Shape, scales: Shape, scales_dtype: torch.dtype) -> bool:
        if len(codes) < 2 or not scales_dtype.is_floating_point:
            return False
        *lead, rows, cols = codes
        return scales == (*lead, -(-rows // self.rows), -(-cols // self.cols))

    def shape(self, codes: Shape) -> Shape:
        return codes

    def source_indices(self, bounds: Bounds) -> tuple[Index, Index]:
        """Indices of the codes and the scales of the values within ``bounds``."""
        *lead, (top, bottom), (first_col, end_col) = bounds
        codes = tuple(slice(*pair) for pair in bounds)
        blocks = (
            slice(top // self.rows, -(-bottom // self.rows)),
            slice(first_col // self.cols, -(-end_col // self.cols)),
        )
        return codes, (*(slice(*pair) for pair in lead), *blocks)

    def dequantize(self, codes: Tensor, scales: Tensor, bounds: Bounds) -> Tensor:
        """Values within ``bounds`` in float32, from the codes and scales at their ``source_indices``."""
        spread = scales.float()
        for axis, size in ((-2, self.rows), (-1, self.cols)):
            start, stop = bounds[axis]
            spread = spread.repeat_interleave(size, axis).narrow(axis, start % size, stop - start)
        return codes.float().mul_(spread)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Experts of gpt-oss in MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 E2M1 values with an E8M0 scale.

    ``X_blocks`` is uint8 [E, out, in / 32, 16] with two values per byte, the low nibble first; ``X_scales`` is uint8
    [E, out, in / 32], exponents biased by 127. The values are ``X`` [E, in, out].
    """

    codes_suffix = "_blocks"
    scales_suffix = "_scales"
    codes_dtype: ClassVar[torch.dtype] = torch.uint8
    split_axis = -1
    """Dimension along which a large tensor is split for dequantization."""

    def __str__(self) -> str:
        return "MXFP4"

    def matches(self, codes: Shape, scales: Shape, scales_dtype: torch.dtype) -> bool:
        return len(codes) == 4 and codes == (*scales, 16) and scales_dtype == torch.uint8

    def shape(self, codes: Shape) -> Shape:
        """Shape of the values."""
        experts, out, blocks, _ = codes
        return experts, blocks * 32, out

    def source_indices(self, bounds: Bounds) -> tuple[Index, Index]:
        experts, (top, bottom), out = bounds
        scales = (slice(*experts), slice(*out), slice(top // 32, -(-bottom // 32)))
        return scales, scales

    def dequantize(self, codes: Tensor, scales: Tensor, bounds: Bounds) -> Tensor:
        """Values within ``bounds`` in bfloat16, which is exact."""
        top, bottom = bounds[1]
        # Indexing dominates the time, so both values of a byte are looked up at once.
        blocks = _PAIRS[codes.int()].view(torch.bfloat16)
        blocks *= _E8M0[scales.int()][..., None]
        return blocks.flatten(-2).narrow(-1, top % 32, bottom - top).mT


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.bfloat16)
_E8M0 = torch.tensor([2.0**exponent for exponent in range(-127, 128)] + [math.nan], dtype=torch.bfloat16)
_SIGNED = torch.cat((_E2M1, -_E2M1))
_PAIRS = torch.stack((_SIGNED.repeat(16), _SIGNED.repeat_interleave(16)), dim=1).view(torch.int32).flatten()
"""The two bfloat16 values of each byte, packed in one int32."""

Quantization = Fp8Blocks | Mxfp4


def parse_quantization(config: Mapping[str, Any]) -> Quantization:
    """The format of a ``quantization_config``; UsageError if it is not supported."""
    if not isinstance(config, Mapping):
        raise DataError(f"config.json: quantization_config must be an object, got {config!r}.")
    method = config.get("quant_method")
    if method == "mxfp4":
        return Mxfp4()
    if method != "fp8":
        raise _unsupported(f"quant_method={method!r}")
    if (experts := config.get("expert_dtype", "fp8")) != "fp8":
        raise _unsupported(f"quant_method='fp8' with expert_dtype={experts!r}")
    block = config.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise _unsupported(f"quant_method='fp8' with weight_block_size={block!r}")
    return Fp8Blocks(*block)


def _unsupported(what: str) -> UsageError:
    return UsageError(
        f"config.json: quantization_config with {what} is not supported. Supported: fp8 with block scales "
        "(weight_block_size=[rows, cols]) and mxfp4. Use the unquantized model, or dequantize it to bfloat16 first."
    )
