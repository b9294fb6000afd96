"""Decoders with experts."""

from __future__ import annotations

from typing import Any

from ranks.tiny_families import bailing_moe, kimi_k2, step3p5
from ranks.tiny_families.nested import STEP, STEP_LIMITS, STEP_LLAMA3, STEP_TRAINED
from ranks.tiny_families.tiny_family import TinyFamily

kimi_k2.register()
bailing_moe.register()
step3p5.register()

_FULL, _SLIDING = "full_attention", "sliding_attention"
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
_BAILING: dict[str, Any] = {
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 2, "topk_group": 1},
    "partial_rotary_factor": 0.5,
}
_ROUTED = _EXPERTS | {"n_routed_experts": 6}
_GROUPS = {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5}
_GRANITE = {"num_local_experts": 6, "head_dim": 8}
_COHERE = {
    **{"num_experts": 6, "num_shared_experts": 2, "sliding_window": 5, "intermediate_size": 12, "logit_scale": 1.0},
    "prefix_dense_intermediate_size": 20,
}
_UNROTATED = {"layer_rope_theta": [10000.0, 0, 10000.0, 0]}
_MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
_LATENT = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 10, "v_head_dim": 6},
    **{"qk_rope_head_dim": 8, "head_dim": 8, "n_shared_experts": 2},
}
_ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}
# Of samples beyond the original length, the class of transformers uses the factors of short ones.
_LONG = {
    **{
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.5, 2.0, 3.0] * 2,
        "long_factor": [9.0] * 8,
    },
    **{"short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": 1024},
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 32}


def _layered(full: dict[str, float], sliding: dict[str, float]) -> dict[str, Any]:
    rope = {_FULL: {"rope_type": "default", **full}, _SLIDING: {"rope_type": "default", **sliding}}
    return {"rope_parameters": rope}


FAMILIES: dict[str, TinyFamily] = {
    "mimo_v2_flash": TinyFamily(
        layouts=({"tp": 2}, {"ep": 2}),
        sizes=_ROUTED | {"head_dim": 24, "v_head_dim": 10, "sliding_window": 5, "attention_bias": True},
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
    "minimax_m2": TinyFamily(
        layouts=({"tp": 2}, {"ep": 2}),
        sizes={"num_local_experts": 6, "num_experts_per_tok": 2},
        logits={
            "minimax_m2": ({}, {"num_experts_per_tok": 1}),
            "minimax_m2-partial": ({"rotary_dim": 8, "tie_word_embeddings": True}, {"rotary_dim": 16}),
        },
    ),
    "glm4_moe_lite": TinyFamily(
        sizes=_LATENT | _ROUTED,
        logits={
            "glm4_moe_lite": (_GROUPS, {"rope_interleave": False}),
            "glm4_moe_lite-yarn": (
                {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}, "q_lora_rank": None},
                {"q_lora_rank": None},
            ),
        },
    ),
    "dots1": TinyFamily(
        sizes=_ROUTED | {"n_shared_experts": 1, "first_k_dense_replace": 1},
        logits={
            "dots1": ({"norm_topk_prob": True, **_GROUPS}, {"topk_group": 1}),
            "dots1-windows": (
                {"sliding_window": 5, "max_window_layers": 2, "attention_bias": True},
                {"max_window_layers": 3},
            ),
        },
    ),
    "granitemoe": TinyFamily(
        sizes=_GRANITE,
        logits={
            "granitemoe": (_MULTIPLIERS | {"logits_scaling": 6.0}, {"embedding_multiplier": 1.0}),
            "granitemoe-biases": ({"attention_bias": True, "num_experts_per_tok": 3}, {"num_experts_per_tok": 2}),
        },
        training=_MULTIPLIERS,
    ),
    "granitemoeshared": TinyFamily(
        layouts=({"tp": 2}, {"ep": 2}),
        sizes=_GRANITE | {"shared_intermediate_size": 20},
        logits={
            "granitemoeshared": (_MULTIPLIERS, {"residual_multiplier": 1.0}),
            "granitemoeshared-without": ({"shared_intermediate_size": 0}, {"shared_intermediate_size": 20}),
        },
        training=_MULTIPLIERS,
    ),
    "granitemoe_swa": TinyFamily(
        sizes=_GRANITE | {"shared_intermediate_size": 20, "sliding_window": 5},
        logits={
            "granitemoe_swa": (_MULTIPLIERS | _UNROTATED, {"layer_rope_theta": [10000.0, 0, 0, 0]}),
            "granitemoe_swa-without": (
                {"shared_intermediate_size": 0, "layer_types": [_SLIDING, _FULL] * 2, "attention_bias": True},
                {"layer_types": [_SLIDING] * 4},
            ),
        },
    ),
    "cohere2_moe": TinyFamily(
        layouts=({"tp": 2}, {"ep": 2}),
        sizes=_COHERE,
        logits={
            "cohere2_moe": (
                {
                    **{"layer_types": [_FULL, _SLIDING] * 2, "mlp_layer_types": ["dense", "sparse"] * 2},
                    **{"rms_norm_eps": 0.1, "expert_selection_fn": "sigmoid"},
                },
                {"prefix_dense_sliding_window_pattern": 4},
            ),
            "cohere2_moe-sum": (
                {"shared_expert_combination_strategy": "sum", "attention_bias": True},
                {"shared_expert_combination_strategy": "average"},
            ),
        },
        training={"mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2},
    ),
    "flex_olmo": TinyFamily(
        sizes={"num_experts": 6, "num_experts_per_tok": 2, "eos_token_id": 2},
        logits={"flex_olmo": ({"norm_topk_prob": True, "attention_bias": True}, {"attention_bias": False})},
    ),
    "solar_open": TinyFamily(
        sizes=_ROUTED | {"n_shared_experts": 2},
        logits={"solar_open": ({"attention_bias": True, **_GROUPS}, {"topk_group": 1})},
    ),
    "mellum": TinyFamily(
        layouts=({"tp": 2}, {"ep": 2}),
        sizes=_EXPERTS | {"num_experts": 6, "sliding_window": 5},
        logits={
            "mellum": (
                _layered(_YARN, {"rope_theta": 10.0}) | {"layer_types": [_SLIDING, _FULL] * 2},
                {"layer_types": [_SLIDING] * 4},
            ),
            "mellum-dense": (
                {"mlp_layer_types": ["dense", "sparse"] * 2, "norm_topk_prob": False, "attention_bias": True},
                {"norm_topk_prob": True},
            ),
        },
        training={"layer_types": [_SLIDING, _FULL], "num_hidden_layers": 2},
    ),
    "aria_text": TinyFamily(
        layouts=({"tp": 2}, {"ep": 2}),
        sizes={"moe_num_experts": 6, "moe_topk": 2, "intermediate_size": 12, "head_dim": 8},
        logits={
            "aria_text": ({"attention_bias": True}, {"attention_bias": False}),
            "aria_text-shared": ({"moe_num_shared_experts": 3, "moe_topk": 3}, {"moe_topk": 2}),
        },
    ),
    "hy_v3": TinyFamily(
        layouts=({"tp": 2}, {"ep": 2}),
        sizes=_EXPERTS | {"num_experts": 6},
        logits={
            "hy_v3": ({"attention_bias": True}, {"router_scaling_factor": 1.0}),
            "hy_v3-layers": ({"mlp_layer_types": ["sparse", "dense"] * 2}, {"mlp_layer_types": None}),
        },
    ),
    "kimi_k2": TinyFamily(
        sizes=_LATENT | _ROUTED | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_mtp_layers": 0},
        logits={"kimi_k2": ({}, {"routed_scaling_factor": 1.0})},
    ),
    "step3p5": TinyFamily(
        sizes=STEP,
        logits={
            "step3p5": (
                {"rope_parameters": STEP_LLAMA3, "attention_bias": True},
                {"rope_parameters": STEP["rope_parameters"]},
            ),
            "step3p5-heads": (STEP_LIMITS, {"num_sliding_attention_heads": 4}),
        },
        training=STEP_TRAINED,
    ),
    "bailing_moe": TinyFamily(
        layouts=({"tp": 2}, {"ep": 2}, {"pp": 2}),
        sizes=_BAILING,
        logits={
            "bailing_moe": ({"routed_scaling_factor": 2.5}, {"use_qk_norm": False}),
            "bailing_moe-biases": (
                {"use_qkv_bias": True, "use_bias": True, "use_qk_norm": False, "num_shared_experts": 2},
                {"partial_rotary_factor": 1.0},
            ),
            "bailing_moe-first": (
                {
                    **{"architectures": [bailing_moe.FIRST], "first_k_dense_replace": 0, "norm_topk_prob": False},
                    "partial_rotary_factor": 1.0,
                },
                {"norm_topk_prob": True},
            ),
        },
    ),
    "bailing_moe_v2": TinyFamily(
        sizes=_BAILING, layouts=(), logits={"bailing_moe_v2": ({"use_qk_norm": False}, {"partial_rotary_factor": 1.0})}
    ),
    "exaone_moe": TinyFamily(
        sizes=_EXPERTS | {"num_experts": 6, "head_dim": 8, "sliding_window": 5},
        logits={
            "exaone_moe": (_GROUPS, {"topk_group": 1}),
            "exaone_moe-layers": (
                {"layer_types": [_FULL, _SLIDING] * 2, "mlp_layer_types": ["sparse", "dense"] * 2},
                {"layer_types": [_SLIDING, _FULL] * 2},
            ),
        },
    ),
    "flint": TinyFamily(
        layouts=({"tp": 2}, {"ep": 2}),
        sizes=_EXPERTS | {"num_experts": 6, "head_dim": 8, "sliding_window": 5, "shared_expert_intermediate_size": 20},
        logits={
            "flint": ({"norm_topk_prob": False, "attention_bias": True}, {"norm_topk_prob": True}),
            "flint-layers": (
                {"layer_types": [_FULL, _SLIDING] * 2, "mlp_only_layers": [2]},
                {"layer_types": [_SLIDING, _FULL] * 2},
            ),
        },
    ),
    "hunyuan_v1_moe": TinyFamily(
        sizes={"num_experts": 6, "moe_topk": 2},
        logits={
            "hunyuan_v1_moe": ({"attention_bias": True}, {"moe_topk": 1}),
            "hunyuan_v1_moe-alpha": (
                {"rope_parameters": _ALPHA, "moe_topk": [2] * 4},
                {},
            ),
        },
    ),
    "afmoe": TinyFamily(
        layouts=({"tp": 2}, {"ep": 2}),
        sizes=_EXPERTS | {"num_experts": 6, "sliding_window": 5},
        logits={
            "afmoe": ({"mup_enabled": True, "route_scale": 2.0}, {"mup_enabled": False}),
            "afmoe-layers": ({"layer_types": [_FULL, _SLIDING] * 2, "num_dense_layers": 2}, {"layer_types": None}),
        },
        training={"mup_enabled": True},
    ),
    "phimoe": TinyFamily(
        sizes={"num_local_experts": 6},
        layouts=(),  # it is not trained
        logits={
            "phimoe": (
                {"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.3, "sliding_window": 5},
                {"router_jitter_noise": 0.0},
            ),
            "phimoe-longrope": (
                {"rope_parameters": _LONG},
                {"rope_parameters": _LONG | {"short_mscale": 1.0, "long_mscale": 1.0}},
            ),
        },
    ),
}
