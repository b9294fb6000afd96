"""Rotary position embedding with the frequency scaling of config.json."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .configuration_isthmus import IsthmusConfig

Table = tuple[Tensor, Tensor]
"""Cosines and sines, each [B, 1, S, R / 2]; R channels of a head are rotated."""


def inverse_frequencies(config: IsthmusConfig, *, windowed: bool, length: int) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [R / 2], and the multiplier of cosines and sines.

    RoFormer (arXiv 2104.09864), Llama 3.1 scaling, YaRN (2309.00071), LongRoPE (2402.13753) for ``length`` tokens.
    """
    rope = config.rope_parameters
    base, kind = rope["rope_theta"], rope.get("rope_type", rope.get("type", "default"))
    if windowed and config.window_rope_theta is not None:
        base, kind = config.window_rope_theta, "default"
    width = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
    plain = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    factor, trained = rope.get("factor", 1.0), rope.get("original_max_position_embeddings", 0)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "llama3":
        turns = trained * plain / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return kept * plain + (1 - kept) * plain / factor, 1.0
    if kind == "longrope":
        each = torch.tensor(rope["long_factor" if length > trained else "short_factor"])
        usual = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
        return plain / each, rope.get("attention_factor") or usual
    if kind != "yarn":
        raise ValueError(f"rope_type {kind!r} is not known")

    def pair_that_turns(times: float) -> float:
        return width / 2 * math.log(trained / (times * 2 * math.pi)) / math.log(base)

    def sharper(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    low, high = pair_that_turns(rope.get("beta_fast") or 32), pair_that_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    stretched = ((torch.arange(width // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    ratio = sharper(rope["mscale"]) / sharper(rope["mscale_all_dim"]) if has_both(rope) else sharper(1.0)
    return plain / factor * stretched + plain * (1 - stretched), rope.get("attention_factor") or ratio


def has_both(rope: dict[str, Any]) -> bool:
    """Whether both magnitude settings of YaRN are set."""
    return bool(rope.get("mscale") and rope.get("mscale_all_dim"))


def rotate(x: Tensor, table: Table, *, interleaved: bool) -> Tensor:
    """Rotate the first R channels of ``x`` [B, N, S, D]."""
    cos, sin = (part.to(x.dtype) for part in table)
    width = 2 * cos.size(-1)
    first, second = (x[..., 0:width:2], x[..., 1:width:2]) if interleaved else x[..., :width].chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    pairs = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((pairs, x[..., width:]), dim=-1)
