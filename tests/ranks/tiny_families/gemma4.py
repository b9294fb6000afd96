"""Gemma 4."""

from __future__ import annotations

from typing import Any

from ranks.tiny_families.tiny_family import TinyFamily

_KINDS = ["sliding_attention", "full_attention"] * 2
_SLIDING = {"rope_type": "default", "rope_theta": 10000.0}
_WHOLE_HEADS = {"full_attention": _SLIDING | {"rope_theta": 1000000.0}, "sliding_attention": _SLIDING}
_DENSE: dict[str, Any] = {
    **{"layer_types": _KINDS, "sliding_window": 5, "global_head_dim": 24, "num_global_key_value_heads": 1},
    **{"attention_k_eq_v": True, "final_logit_softcapping": 3.0},
}
_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 12}
# The whole model needs a padding token, whose embedding transformers does not train; samples do not have this one.
_ROWS = {"vocab_size": 78, "vocab_size_per_layer_input": 78, "pad_token_id": 77}
SMALL: dict[str, Any] = _ROWS | {
    **{"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "attention_k_eq_v": False,
}
_VISION: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8},
    **{"num_key_value_heads": 2, "patch_size": 4, "position_embedding_size": 16, "pooling_kernel_size": 2},
}
_AUDIO: dict[str, Any] = {
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16},
    "subsampling_conv_channels": [4, 2],
}
_NO_EXPERTS = {"enable_moe_block": False}
_LAYERS = {"num_hidden_layers": 4}
_PATCHES = {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 32}

FAMILIES: dict[str, TinyFamily] = {
    "gemma4_text": TinyFamily(
        sizes=_DENSE | _EXPERTS | {"hidden_size_per_layer_input": 0},
        logits={
            "gemma4_text": ({}, {"top_k_experts": 1}),
            "gemma4_text-dense": (_NO_EXPERTS, _NO_EXPERTS | {"rope_parameters": _WHOLE_HEADS}),
            "gemma4_text-values": (
                _NO_EXPERTS | {"attention_k_eq_v": False, "tie_word_embeddings": False},
                _NO_EXPERTS | {"final_logit_softcapping": None, "tie_word_embeddings": False},
            ),
            "gemma4_text-small": (_NO_EXPERTS | SMALL, _NO_EXPERTS | SMALL | {"sliding_window": 50}),
        },
        layouts=({"tp": 2}, {"ep": 2}),
        training=_LAYERS,
    ),
    "gemma4": TinyFamily(
        sizes=_DENSE | SMALL,
        around={"vision_config": _VISION, "audio_config": _AUDIO},
        logits={"gemma4": ({}, {"sliding_window": 50})},
        layouts=({"tp": 2}, {"cp": 2}),
        training=_LAYERS,
    ),
    "gemma4_unified_text": TinyFamily(
        sizes=_DENSE,
        logits={"gemma4_unified_text": ({}, {"rope_parameters": _WHOLE_HEADS})},
        layouts=({"tp": 2}, {"pp": 2}),
        training=_LAYERS,
    ),
    "gemma4_unified": TinyFamily(
        sizes=_DENSE | {"vocab_size": 78, "pad_token_id": 77},
        around={"vision_config": _PATCHES, "audio_config": {"audio_embed_dim": 16}},
        logits={"gemma4_unified": ({}, {"rope_parameters": _WHOLE_HEADS})},
        training=_LAYERS,
    ),
}
