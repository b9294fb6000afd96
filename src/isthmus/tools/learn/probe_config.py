"""Sizes and settings of the small probe models on which mappings are tested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NUM_SHARED_EXPERTS = 2


@dataclass(frozen=True, slots=True)
class ProbeSizes:
    sizes: Mapping[str, int]
    """Sizes by field of the Architecture. All sizes are different, and none is a default of a config."""
    numbers: Mapping[str, float]
    """Values of epsilon, theta and multipliers that change the logits visibly."""
    more_layers: int
    sliding_window: int


_NUMBERS = {"epsilon": 1e-2, "rope_theta": 1000.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.6}
_NUMBERS |= {"attention_multiplier": 0.4, "query_pre_attn_scalar": 6, "logits_scaling": 3.0, "logit_scale": 0.5}
_NUMBERS |= {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5, "routed_scaling_factor": 1.4}
_FIRST = {"hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 88, "vocab_size": 101}
_FIRST |= {"max_position_embeddings": 96, "moe.num_experts": 6, "moe.top_k": 2, "moe.ffn_hidden_size": 20}
_FIRST |= {"moe.shared_ffn_hidden_size": 28, "moe.num_groups": 2, "moe.group_top_k": 1, "moe.dense_layers": 1}
_SECOND = {"hidden_size": 96, "num_attention_heads": 6, "ffn_hidden_size": 136, "vocab_size": 83}
_SECOND |= {"max_position_embeddings": 112, "moe.num_experts": 8, "moe.top_k": 3, "moe.ffn_hidden_size": 28}
_SECOND |= {"moe.shared_ffn_hidden_size": 36, "moe.num_groups": 4, "moe.group_top_k": 2, "moe.dense_layers": 2}
FIRST = tuple(
    ProbeSizes(_FIRST | {"num_query_groups": groups, "kv_channels": width}, _NUMBERS, 0, 7)
    for groups, width in ((2, 24), (2, 16), (4, 16))
)
"""Probes for the search; the first one that the model supports is used."""
SECOND = tuple(
    ProbeSizes(
        _SECOND | {"num_query_groups": groups, "kv_channels": width}, {key: n * 2 for key, n in _NUMBERS.items()}, 1, 5
    )
    for groups, width in ((3, 32), (3, 16), (6, 16))
)
"""Probes of other sizes, which verify the mapping."""


def probe_rotary(settings: Mapping[str, Any], probe: ProbeSizes) -> dict[str, Any]:
    """Rotary settings with non-default frequencies, and an original length that a short sample exceeds."""
    rotary: dict[str, Any] = {
        name: probe_rotary(value, probe) if isinstance(value, Mapping) else value for name, value in settings.items()
    }
    if rotary.get("rope_theta") is not None:
        rotary["rope_theta"] = probe.numbers["rope_theta"] * (1.0 if rotary["rope_theta"] < 1e5 else 1.5)
    if rotary.get("original_max_position_embeddings") is not None:
        rotary["original_max_position_embeddings"] = 16
    pairs = int(probe.sizes["kv_channels"] * rotary.get("partial_rotary_factor", 1.0)) // 2
    return rotary | {name: list(rotary[name])[:pairs] for name in ("short_factor", "long_factor") if name in rotary}
