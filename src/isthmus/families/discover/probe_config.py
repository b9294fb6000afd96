"""Sizes and settings of the small probe models on which mappings are tested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ProbeSizes:
    """All sizes are different, and none is a default of a config."""

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
    """By field of the Architecture."""
    numbers: Mapping[str, float]
    """Values of epsilon, theta and multipliers that change the logits visibly."""


_FIRST = {"epsilon": 1e-2, "rope_theta": 1000.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.6}
_FIRST |= {"attention_multiplier": 0.4, "query_pre_attn_scalar": 6, "logits_scaling": 3.0, "logit_scale": 0.5}
_FIRST |= {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5}
_FIRST |= {"routed_scaling_factor": 1.4}
_SECOND = {name: value * 2 for name, value in _FIRST.items()}
_FEW = {"moe.num_experts": 6, "moe.top_k": 2, "moe.ffn_hidden_size": 20, "moe.shared_ffn_hidden_size": 28}
_FEW |= {"moe.num_groups": 2, "moe.group_top_k": 1, "moe.dense_layers": 1}
_MORE = {"moe.num_experts": 8, "moe.top_k": 3, "moe.ffn_hidden_size": 28, "moe.shared_ffn_hidden_size": 36}
_MORE |= {"moe.num_groups": 4, "moe.group_top_k": 2, "moe.dense_layers": 2}
NUM_SHARED_EXPERTS = 2
FIRST = (
    ProbeSizes(64, 4, 2, 24, 88, 101, 96, 0, 7, _FEW, _FIRST),
    ProbeSizes(64, 4, 2, 16, 88, 101, 96, 0, 7, _FEW, _FIRST),
    ProbeSizes(64, 4, 4, 16, 88, 101, 96, 0, 7, _FEW, _FIRST),
)
"""Probes for the search; the first one that the model supports is used."""
SECOND = (
    ProbeSizes(96, 6, 3, 32, 136, 83, 112, 1, 5, _MORE, _SECOND),
    ProbeSizes(96, 6, 3, 16, 136, 83, 112, 1, 5, _MORE, _SECOND),
    ProbeSizes(96, 6, 6, 16, 136, 83, 112, 1, 5, _MORE, _SECOND),
)
"""Probes of other sizes, which verify the mapping."""


def probe_rotary(settings: Mapping[str, Any], probe: ProbeSizes) -> dict[str, Any]:
    """Rotary settings with non-default frequencies, and an original length that a short sample exceeds."""
    found: dict[str, Any] = {
        name: probe_rotary(value, probe) if isinstance(value, Mapping) else value for name, value in settings.items()
    }
    if found.get("rope_theta") is not None:
        found["rope_theta"] = probe.numbers["rope_theta"] * (1.0 if found["rope_theta"] < 1e5 else 1.5)
    if found.get("original_max_position_embeddings") is not None:
        found["original_max_position_embeddings"] = 16
    pairs = int(probe.kv_channels * found.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if name in found:
            found[name] = list(found[name])[:pairs]
    return found
