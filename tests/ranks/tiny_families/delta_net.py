"""Hybrid decoders with linear attention."""

from __future__ import annotations

from typing import Any

from ranks.tiny_families.tiny_family import TinyFamily

DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "rms_norm_eps": 1e-2,  # outputs of the rule near 0 have few digits, and the norm after it would enlarge them
    "full_attention_interval": 2,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}

KIMI = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 12,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "rms_norm_eps": 1e-2,
}
OLMO = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 12,  # the width of keys: transformers saves convolutions as thirds
}
OLMO_LAYERS = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
NO_POSITIONS = {"rope_type": "default", "rope_theta": None}
BAILING = {name: size for name, size in KIMI.items() if not name.startswith(("num_expert", "linear"))} | {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "layer_group_size": 2,
    "num_mtp_layers": 0,
    "eos_token_id": 2,
}
KIMI_LAYERS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}
FAMILIES: dict[str, TinyFamily] = {
    "qwen3_5_text": TinyFamily(
        sizes=DELTA,
        logits={
            "qwen3_5_text": ({"tie_word_embeddings": True}, {"full_attention_interval": 4}),
            "qwen3_5_text-mrope": (
                {"rope_parameters": MROPE | {"mrope_interleaved": True}},
                {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
            ),
        },
    ),
    "qwen3_5_moe_text": TinyFamily(
        sizes=DELTA | EXPERTS,
        logits={"qwen3_5_moe_text": ({"attention_bias": True}, {"num_experts_per_tok": 1})},
    ),
    "kimi_linear": TinyFamily(
        sizes=KIMI,
        logits={
            "kimi_linear": ({"layer_types": KIMI_LAYERS, "num_expert_group": 2}, {"num_experts_per_token": 1}),
            "kimi_linear-low-rank-queries": (
                {"layer_types": KIMI_LAYERS, "q_lora_rank": 20, "mlp_layer_types": ["sparse"] * 4},
                {"moe_renormalize": False},
            ),
        },
        training={"layer_types": KIMI_LAYERS, "num_hidden_layers": 4},
    ),
    "olmo_hybrid": TinyFamily(
        sizes=OLMO,
        logits={
            "olmo_hybrid": (
                {"layer_types": OLMO_LAYERS, "linear_conv_kernel_dim": 3},
                {"linear_allow_neg_eigval": False},
            ),
            "olmo_hybrid-without-positions": (
                {"rope_parameters": NO_POSITIONS, "attention_bias": True},
                {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            ),
        },
        layouts=({"tp": 2}, {"pp": 2}),
        training={"layer_types": OLMO_LAYERS, "num_hidden_layers": 4},
    ),
    "bailing_hybrid": TinyFamily(
        layouts=({"tp": 2}, {"pp": 2}, {"ep": 2}),
        sizes=BAILING,
        logits={
            "bailing_hybrid": ({}, {"kda_lower_bound": -1.0}),
            "bailing_hybrid-pattern": (
                {"kda_safe_gate": False, "layer_group_size": 3, "mlp_layer_types": ["sparse"] * 4},
                {"norm_topk_prob": False},
            ),
        },
    ),
    "qwen3_next": TinyFamily(
        sizes=DELTA | EXPERTS,
        logits={
            "qwen3_next": ({"mlp_only_layers": [1], "linear_conv_kernel_dim": 3}, {"norm_topk_prob": False}),
            "qwen3_next-pattern": (
                {"full_attention_interval": 4, "attention_bias": True, "decoder_sparse_step": 2},
                {"decoder_sparse_step": 1},
            ),
        },
    ),
}
