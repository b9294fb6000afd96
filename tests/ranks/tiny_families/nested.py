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
_FULL, _SLIDING = "full_attention", "sliding_attention"
STEP: dict[str, Any] = {
    **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "share_expert_dim": 20},
    **{"head_dim": 16, "sliding_window": 5, "num_sliding_attention_heads": 6, "vocab_size": 78, "pad_token_id": 77},
    **{"layer_types": [_FULL, _SLIDING, _SLIDING, _FULL], "mlp_layer_types": ["dense", *["sparse"] * 3]},
    "rope_parameters": {
        _FULL: {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        _SLIDING: {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
    },
}
_STEP_SCALING = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0}
STEP_LLAMA3 = {
    _FULL: STEP["rope_parameters"][_FULL]
    | _STEP_SCALING
    | {"rope_type": "llama3", "original_max_position_embeddings": 16},
    _SLIDING: STEP["rope_parameters"][_SLIDING],
}
STEP_LIMITS: dict[str, Any] = {"swiglu_limits": [0.0, 0.0, 0.02, 0.01], "swiglu_limits_shared": [0.01, 0.0, 0.0, 0.02]}
STEP_TRAINED: dict[str, Any] = {
    **{"num_hidden_layers": 2, "layer_types": [_SLIDING, _FULL], "mlp_layer_types": ["dense", "sparse"]},
    **{"swiglu_limits": [0.0, 0.3], "swiglu_limits_shared": [0.4, 0.3]},
}
_STEP_VISION = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 7}

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
_QWEN2_VISION: dict[str, Any] = {
    **{"depth": 2, "embed_dim": 16, "mlp_ratio": 2, "num_heads": 2, "patch_size": 4, "hidden_size": 32},
    "spatial_merge_size": 2,
}
_CLIP = _VISION | {"model_type": "clip_vision_model", "projection_dim": 16}
_SIGLIP = _VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}
_GLM_VISION: dict[str, Any] = {
    **{"depth": 2, "hidden_size": 16, "num_heads": 2, "image_size": 8, "patch_size": 2, "intermediate_size": 24},
    **{"out_hidden_size": 32, "spatial_merge_size": 2},
}
_GLM_ROPE: dict[str, Any] = {"rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
_MROPE2: dict[str, Any] = {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_MROPE: dict[str, Any] = {
    "rope_parameters": {"rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    "tie_word_embeddings": False,
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
    "qwen3_vl": TinyFamily(
        around={"vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]}},
        logits={"qwen3_vl": (_MROPE, None), "qwen3_vl-tied": ({"tie_word_embeddings": True}, None)},
    ),
    "qwen3_vl_moe": TinyFamily(
        sizes={"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
        around={"vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]}},
        logits={"qwen3_vl_moe": ({"mlp_only_layers": [1]}, {"num_experts_per_tok": 1})},
        layouts=({"ep": 2},),
    ),
    "qwen2_vl": TinyFamily(
        sizes={"head_dim": 8, **_MROPE2},
        around={"vision_config": _QWEN2_VISION},
        logits={
            "qwen2_vl": (
                {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
                {"use_sliding_window": False},
            ),
        },
    ),
    "qwen2_5_vl": TinyFamily(
        sizes={"head_dim": 8, **_MROPE2},
        around={"vision_config": _QWEN_VISION | {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}},
        logits={"qwen2_5_vl": ({"tie_word_embeddings": True}, None)},
    ),
    "internvl": TinyFamily(
        around={"vision_config": _VISION | {"image_size": [28, 28], "patch_size": [14, 14]}, "downsample_ratio": 1.0},
        logits={
            "internvl": ({"tie_word_embeddings": False}, None),
            "internvl-qwen3": ({"model_type": "qwen3"}, None),
            "internvl-gpt_oss": (
                {"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5},
                {"sliding_window": 50},
            ),
        },
    ),
    "llava": TinyFamily(
        around={"vision_config": _CLIP},
        logits={
            "llava": ({}, None),
            "llava-mistral": ({"model_type": "mistral", "sliding_window": 5}, {"sliding_window": 50}),
        },
    ),
    "llava_next": TinyFamily(
        around={"vision_config": _CLIP, "image_grid_pinpoints": [[28, 28]]},
        logits={"llava_next": ({"model_type": "mistral", "sliding_window": 5}, {"sliding_window": 50})},
    ),
    "llava_onevision": TinyFamily(
        around={"vision_config": _SIGLIP, "image_grid_pinpoints": [[28, 28]]},
        logits={"llava_onevision": ({"tie_word_embeddings": True}, None)},
    ),
    "glm4v": TinyFamily(
        sizes={"head_dim": 8, "rope_parameters": _GLM_ROPE | {"mrope_section": [1, 1]}},
        around={"vision_config": _GLM_VISION},
        logits={
            "glm4v": ({}, {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 2]}}),
        },
    ),
    "glm4v_moe": TinyFamily(
        sizes={
            **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 2},
            "rope_parameters": _GLM_ROPE,
        },
        around={"vision_config": _GLM_VISION},
        logits={"glm4v_moe": ({}, {"topk_group": 2})},
        layouts=({"ep": 2},),
    ),
    "idefics3": TinyFamily(around={"vision_config": _VISION}, logits={"idefics3": ({}, None)}),
    "smolvlm": TinyFamily(around={"vision_config": _VISION}, logits={"smolvlm": ({"rms_norm_eps": 1e-2}, None)}),
    "lfm2_vl": TinyFamily(
        sizes={"layer_types": ["conv", "full_attention", "conv", "full_attention"], "head_dim": 8},
        around={"vision_config": _VISION | {"num_patches": 4}},
        logits={"lfm2_vl": ({}, None)},
        training={"num_hidden_layers": 4},
    ),
    "step3p7": TinyFamily(
        sizes=STEP,
        around={"vision_config": _STEP_VISION},
        layouts=({"ep": 2},),
        logits={
            "step3p7": ({}, {"sliding_window": 50}),
            "step3p7-limits": (STEP_LIMITS, {"swiglu_limits": None}),
            "step3p7-dense-limits": (STEP_LIMITS, {"swiglu_limits_shared": None}),
            "step3p7-scaled": (
                {"rope_parameters": STEP_LLAMA3, "moe_router_scaling_factor": 3.0, "attention_bias": True},
                {"rope_parameters": STEP["rope_parameters"]},
            ),
            "step3p7-listed": (
                {"rope_parameters": None, "rope_theta": [1000.0, 100.0, 100.0, 1000.0], "query_pre_attn_scalar": 8},
                {"query_pre_attn_scalar": 16},
            ),
        },
        training=STEP_TRAINED,
    ),
    "kimi_k25": TinyFamily(
        sizes=LATENT | {"model_type": "deepseek_v3", "n_group": 2, "topk_group": 1, "num_mtp_layers": 0},
        around={"vision_config": _KIMI_VISION, "projection_hidden_size": 16},
        logits={"kimi_k25": ({"tie_word_embeddings": False}, {"tie_word_embeddings": False, "topk_group": 2})},
        layouts=({"ep": 2},),
    ),
}
