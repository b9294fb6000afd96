"""Rotary positions: the table of angles for a line of packed samples, and the rotation itself.

Frequencies follow RoFormer (arXiv 2104.09864); the ``llama3`` stretch is the one that Llama 3.1 introduced, with
all four of its constants taken from the model's config (Megatron-Core's own has three of them fixed). YaRN is that of
arXiv 2309.00071, section 3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from isthmus.families.architecture import Architecture, RopeScaling


def inverse_frequencies(architecture: Architecture) -> Tensor:
    """Angle per position of each pair of rotated channels, float32 [D / 2]."""
    mla = architecture.mla
    width = architecture.kv_channels if mla is None else mla.qk_rope_head_dim
    exponent = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    frequencies = 1.0 / (architecture.rotary_base**exponent)
    scaling = architecture.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        return _yarn(frequencies, scaling, architecture.rotary_base)
    return _llama3(frequencies, scaling)


def magnitude(scaling: RopeScaling | None) -> float:
    """What cosines and sines are multiplied by (arXiv 2309.00071, section 3.4; 1 for all but YaRN)."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """By how much more sharply a model looks whose context is stretched ``factor`` times."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(frequencies: Tensor, scaling: RopeScaling, base: float) -> Tensor:
    pairs = frequencies.numel()

    def pair_that_turns(times: float) -> float:
        """Number of the pair that turns so many times within the original length."""
        return pairs * math.log(scaling.original_max_position_embeddings / (times * 2 * math.pi)) / math.log(base)

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    high += 0.001 if low == high else 0
    stretched = ((torch.arange(pairs, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * stretched + frequencies * (1 - stretched)


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


def rotation_table(frequencies: Tensor, position_ids: Tensor, dtype: torch.dtype, *, magnitude: float = 1.0) -> Tensor:
    """Cosines and sines of the angles of each position, one tensor so that recomputation can carry it.

    Args:
        frequencies: float32 [D / 2].
        position_ids: int64 [T], restarting at 0 in each packed sample.
        dtype: of the activations; the angles are computed in float32 whatever it is.
        magnitude: what both are multiplied by.

    Returns:
        [T, D]: D / 2 cosines, then D / 2 sines.
    """
    angles = position_ids[:, None].float() * frequencies[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(magnitude).to(dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(table)
        ctx.interleaved = interleaved
        return _rotated(x, table, interleaved, inverse=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # A rotation is undone by the opposite angle, and its transpose is its inverse.
        (table,) = ctx.saved_tensors
        return _rotated(grads[0], table, ctx.interleaved, inverse=True), None, None


def _rotated(x: Tensor, table: Tensor, interleaved: bool, *, inverse: bool) -> Tensor:
    cos, sin = table.view(table.size(0), *(1,) * (x.dim() - 2), -1).chunk(2, dim=-1)
    first, second = _pairs(x, interleaved)
    # In memory the heads come first, as attention wants them.
    out = torch.empty(x.size(1), x.size(0), *x.shape[2:], dtype=x.dtype, device=x.device).transpose(0, 1)
    out_first, out_second = _pairs(out, interleaved)
    sign = -1 if inverse else 1
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return out


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second channel of each pair."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second


def rotate(x: Tensor, table: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn each pair of channels of ``x`` [T, G, ..., D] by its angle in ``table`` [T, D].

    A pair is (i, i + D/2), or (2i, 2i + 1) where they are ``interleaved``.
    """
    return _Rotate.apply(x, table, interleaved)
