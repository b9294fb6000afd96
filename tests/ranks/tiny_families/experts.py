"""Decoders with experts."""

from __future__ import annotations

from typing import Any

from ranks.tiny_families.tiny_family import TinyFamily

_FULL, _SLIDING = "full_attention", "sliding_attention"
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}


def _layered(full: dict[str, float], sliding: dict[str, float]) -> dict[str, Any]:
    rope = {_FULL: {"rope_type": "default", **full}, _SLIDING: {"rope_type": "default", **sliding}}
    return {"rope_parameters": rope}


FAMILIES: dict[str, TinyFamily] = {
    "mimo_v2_flash": TinyFamily(
        sizes=_EXPERTS
        | {"head_dim": 24, "v_head_dim": 10, "n_routed_experts": 6, "sliding_window": 5, "attention_bias": True},
        logits={
            "mimo_v2_flash": ({}, {"sliding_window": 50}),
            "mimo_v2_flash-layers": (
                {
                    **_layered(
                        {"rope_theta": 1000.0, "partial_rotary_factor": 0.5},
                        {"rope_theta": 10.0, "partial_rotary_factor": 0.25},
                    ),
                    **{"layer_types": [_SLIDING, _FULL, _SLIDING, _FULL], "mlp_layer_types": ["sparse", "dense"] * 2},
                    **{"attention_value_scale": 2.0, "norm_topk_prob": False, "n_group": 3, "topk_group": 2},
                },
                {"attention_value_scale": None},
            ),
        },
    ),
}
