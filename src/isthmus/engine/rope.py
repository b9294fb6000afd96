"""Rotary positions: the table of angles for a line of packed samples, and the rotation itself.

Frequencies follow RoFormer (arXiv 2104.09864); the ``llama3`` stretch is the one that Llama 3.1 introduced, with
all four of its constants taken from the model's config (Megatron-Core's own has three of them fixed).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from isthmus.families.architecture import Architecture, RopeScaling


def inverse_frequencies(architecture: Architecture) -> Tensor:
    """Angle per position of each pair of channels, float32 [D / 2]."""
    exponent = torch.arange(0, architecture.kv_channels, 2, dtype=torch.int64).float() / architecture.kv_channels
    frequencies = 1.0 / (architecture.rotary_base**exponent)
    scaling = architecture.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    wavelength = 2 * math.pi / frequencies
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    share_kept = (scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - share_kept) * frequencies / scaling.factor + share_kept * frequencies
    stretched = torch.where(wavelength > longest, frequencies / scaling.factor, blended)
    return torch.where(wavelength < shortest, frequencies, stretched)


def rotation_table(frequencies: Tensor, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of the angles of each position, one tensor so that recomputation can carry it.

    Args:
        frequencies: float32 [D / 2].
        position_ids: int64 [T], restarting at 0 in each packed sample.
        dtype: of the activations; the angles are computed in float32 whatever it is.

    Returns:
        [T, D]: D / 2 cosines, then D / 2 sines.
    """
    angles = position_ids[:, None].float() * frequencies[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return _rotated(x, table, inverse=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # A rotation is undone by the opposite angle, and its transpose is its inverse.
        (table,) = ctx.saved_tensors
        return _rotated(grads[0], table, inverse=True), None


def _rotated(x: Tensor, table: Tensor, *, inverse: bool) -> Tensor:
    cos, sin = table.view(table.size(0), *(1,) * (x.dim() - 2), -1).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    # In memory the heads come first, as attention wants them.
    out = torch.empty(x.size(1), x.size(0), *x.shape[2:], dtype=x.dtype, device=x.device).transpose(0, 1)
    out_first, out_second = out.chunk(2, dim=-1)
    sign = -1 if inverse else 1
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return out


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn each pair (channel i, channel i + D/2) of ``x`` [T, G, ..., D] by its angle in ``table`` [T, D]."""
    return _Rotate.apply(x, table)
