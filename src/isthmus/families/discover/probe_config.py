"""Sizes of small copies of an unknown model, and numbers that show in their logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shrunken:
    """Sizes of a small copy; no two of them are alike, and none is one that a config has by default."""

    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    more_layers: int
    sliding_window: int
    experts: Mapping[str, int]
    """Of mixtures of experts."""
    numbers: Mapping[str, float]
    """Of epsilon, theta and multipliers: values that show in the logits."""


_FIRST = {"epsilon": 1e-2, "rope_theta": 1000.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.6}
_FIRST |= {"attention_multiplier": 0.4, "query_pre_attn_scalar": 6, "logits_scaling": 3.0, "logit_scale": 0.5}
_FIRST |= {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5}
_FIRST |= {"routed_scaling_factor": 1.4}
_SECOND = {name: value * 2 for name, value in _FIRST.items()}
_FEW = {"moe.num_experts": 6, "moe.top_k": 2, "moe.ffn_hidden_size": 20, "moe.shared_ffn_hidden_size": 28}
_FEW |= {"moe.num_groups": 2, "moe.group_top_k": 1, "moe.dense_layers": 1}
_MORE = {"moe.num_experts": 8, "moe.top_k": 3, "moe.ffn_hidden_size": 28, "moe.shared_ffn_hidden_size": 36}
_MORE |= {"moe.num_groups": 4, "moe.group_top_k": 2, "moe.dense_layers": 2}
SHARED = 2
"""Shared experts of a copy, where they are counted."""
FIRST = (
    Shrunken(64, 4, 2, 24, 88, 101, 96, 0, 7, _FEW, _FIRST),
    Shrunken(64, 4, 2, 16, 88, 101, 96, 0, 7, _FEW, _FIRST),
    Shrunken(64, 4, 4, 16, 88, 101, 96, 0, 7, _FEW, _FIRST),
)
"""The copy that mappings are tried on: heads with a width of their own if the model can have them, groups if it can."""
SECOND = (
    Shrunken(96, 6, 3, 32, 136, 83, 112, 1, 5, _MORE, _SECOND),
    Shrunken(96, 6, 3, 16, 136, 83, 112, 1, 5, _MORE, _SECOND),
    Shrunken(96, 6, 6, 16, 136, 83, 112, 1, 5, _MORE, _SECOND),
)
"""The other one, on which the mapping that was found has to hold as well."""


def shrunken_rotary(told: Mapping[str, Any], small: Shrunken) -> dict[str, Any]:
    """Frequencies that differ from those of any default, and lengths that a short sample exceeds."""
    found: dict[str, Any] = {
        name: shrunken_rotary(value, small) if isinstance(value, Mapping) else value for name, value in told.items()
    }
    if found.get("rope_theta") is not None:
        found["rope_theta"] = small.numbers["rope_theta"] * (1.0 if found["rope_theta"] < 1e5 else 1.5)
    if found.get("original_max_position_embeddings") is not None:
        found["original_max_position_embeddings"] = 16
    pairs = int(small.kv_channels * found.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if name in found:
            found[name] = list(found[name])[:pairs]
    return found
