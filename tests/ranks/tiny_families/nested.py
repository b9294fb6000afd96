"""Language models of multimodal configs."""

from __future__ import annotations

from typing import Any

from ranks.tiny_families.delta_net import DELTA, EXPERTS
from ranks.tiny_families.tiny_family import LATENT, TinyFamily

_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

_GROWING = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
_MINISTRAL3: dict[str, Any] = {"rope_parameters": _GROWING | {"llama_4_scaling_beta": 0.7, "mscale": 1.0}}
_KIMI_VISION: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4},
    **{"pos_emb_height": 4, "pos_emb_width": 4},
}

_LLAMA4: dict[str, Any] = {
    "intermediate_size": 12,
    "intermediate_size_mlp": 48,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "attention_chunk_size": 5,
    "no_rope_layer_interval": 2,
    "interleave_moe_layer_step": 2,
    "floor_scale": 4,
    "attn_scale": 0.7,
}
_LLAMA4_VISION: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"vision_output_dim": 16, "image_size": 8, "patch_size": 2, "projector_input_dim": 16},
    "projector_output_dim": 16,
}
_QWEN_VISION: dict[str, Any] = {
    **{"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32},
    **{"num_position_embeddings": 16, "spatial_merge_size": 2},
}

FAMILIES: dict[str, TinyFamily] = {
    "gemma3": TinyFamily(
        sizes={"sliding_window": 5, "sliding_window_pattern": 2},
        around={"vision_config": _VISION, "mm_tokens_per_image": 4},
        logits={"gemma3": ({}, {"sliding_window": 50}), "gemma3-untied": ({"tie_word_embeddings": False}, None)},
    ),
    "mistral3": TinyFamily(
        around={"vision_config": _VISION | {"head_dim": 8}},
        logits={
            "mistral3": ({"sliding_window": 5}, {"sliding_window": None}),
            "mistral3-ministral3": (_MINISTRAL3 | {"model_type": "ministral3"}, None),
        },
        training={"tie_word_embeddings": False},
    ),
    "ministral": TinyFamily(
        logits={
            "ministral": ({"sliding_window": 5}, {"sliding_window": 50}),
            "ministral-listed": (
                {"sliding_window": 5, "layer_types": ["full_attention", *["sliding_attention"] * 3]},
                {"layer_types": ["sliding_attention"] * 4},
            ),
        },
        training={"sliding_window": 5},
    ),
    "ministral3": TinyFamily(
        logits={
            "ministral3": (
                _MINISTRAL3,
                {"rope_parameters": _MINISTRAL3["rope_parameters"] | {"llama_4_scaling_beta": 0.0}},
            ),
        },
        training=_MINISTRAL3,
    ),
    "llama4_text": TinyFamily(
        sizes=_LLAMA4,
        logits={
            "llama4_text": ({}, {"attention_chunk_size": 50}),
            "llama4_text-positions": (
                {"use_qk_norm": False, "num_experts_per_tok": 1, "no_rope_layers": [0, 1, 1, 0]},
                {"attn_scale": 0.0},
            ),
        },
    ),
    "llama4": TinyFamily(
        sizes=_LLAMA4,
        around={"vision_config": _LLAMA4_VISION},
        layouts=({"ep": 2},),
        logits={"llama4": ({}, {"use_qk_norm": False})},
    ),
    "qwen3_5": TinyFamily(
        sizes=DELTA,
        around={"vision_config": _QWEN_VISION},
        logits={"qwen3_5": ({"tie_word_embeddings": True}, {"full_attention_interval": 4})},
    ),
    "qwen3_5_moe": TinyFamily(
        sizes=DELTA | EXPERTS,
        around={"vision_config": _QWEN_VISION},
        logits={"qwen3_5_moe": ({}, {"num_experts_per_tok": 1})},
        layouts=({"ep": 2},),
    ),
    "kimi_k25": TinyFamily(
        sizes=LATENT | {"model_type": "deepseek_v3", "n_group": 2, "topk_group": 1, "num_mtp_layers": 0},
        around={"vision_config": _KIMI_VISION, "projection_hidden_size": 16},
        logits={"kimi_k25": ({"tie_word_embeddings": False}, {"tie_word_embeddings": False, "topk_group": 2})},
        layouts=({"ep": 2},),
    ),
}
