"""Rotary position embedding with the frequency scaling of config.json."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .configuration_isthmus import IsthmusConfig

Table = tuple[Tensor, Tensor]
"""Cosines and sines, each [B, 1, S, R / 2]; R channels of a head are rotated."""


def inverse_frequencies(config: IsthmusConfig, *, windowed: bool, length: int) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [R / 2], and the multiplier of cosines and sines.

    RoFormer (arXiv 2104.09864), Llama 3.1 scaling, YaRN (2309.00071), LongRoPE (2402.13753) and dynamic NTK scaling for
    ``length`` tokens.
    """
    rope = config.rope_parameters
    base, kind = rope["rope_theta"], rope.get("rope_type", rope.get("type", "default"))
    if windowed and config.window_rope_theta is not None:
        base, kind = config.window_rope_theta, "default"
    width = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
    inv_freq = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    factor, original_length = rope.get("factor", 1.0), rope.get("original_max_position_embeddings", 0)
    if kind == "default":
        return inv_freq, 1.0
    if kind == "dynamic":
        stretch = factor * max(length / config.max_position_embeddings, 1.0) - (factor - 1)
        return inv_freq * stretch ** -(torch.arange(width // 2) / max(width // 2 - 1, 1)), 1.0
    if kind == "linear":
        return inv_freq / factor, 1.0
    if kind == "llama3":
        rotations = original_length * inv_freq / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        unscaled = ((rotations - low) / (high - low)).clamp(0, 1)
        return unscaled * inv_freq + (1 - unscaled) * inv_freq / factor, 1.0
    if kind == "longrope":
        factors = torch.tensor(rope["long_factor" if length > original_length else "short_factor"])
        default_factor = math.sqrt(1 + math.log(factor) / math.log(original_length)) if factor > 1 else 1.0
        return inv_freq / factors, rope.get("attention_factor") or default_factor
    if kind != "yarn":
        raise ValueError(f"rope_type {kind!r} is not supported")

    def correction_dim(rotations: float) -> float:
        return width / 2 * math.log(original_length / (rotations * 2 * math.pi)) / math.log(base)

    def mscale(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    low, high = correction_dim(rope.get("beta_fast") or 32), correction_dim(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = ((torch.arange(width // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    has_mscale = rope.get("mscale") and rope.get("mscale_all_dim")
    default_factor = mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"]) if has_mscale else mscale(1.0)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), rope.get("attention_factor") or default_factor


def rotate(x: Tensor, table: Table, *, interleaved: bool) -> Tensor:
    """Rotate the first R channels of ``x`` [B, N, S, D]."""
    cos, sin = (part.to(x.dtype) for part in table)
    width = 2 * cos.size(-1)
    first, second = (x[..., 0:width:2], x[..., 1:width:2]) if interleaved else x[..., :width].chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    pairs = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return torch.cat((pairs, x[..., width:]), dim=-1)
