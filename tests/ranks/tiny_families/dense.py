"""Dense decoders."""

from __future__ import annotations

from typing import Any

from ranks.tiny_families import mimo
from ranks.tiny_families.tiny_family import TinyFamily

mimo.register()

_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
_WINDOW: dict[str, Any] = {"sliding_window": 5, "layer_types": _KINDS}
_PARTIAL = _PLAIN | {"partial_rotary_factor": 1.0}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_GPT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

_LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8},
    **{"v_head_dim": 6, "head_dim": 8},
}

FAMILIES: dict[str, TinyFamily] = {
    "ernie4_5": TinyFamily(
        logits={"ernie4_5": ({}, {"use_bias": True}), "ernie4_5-biases": ({"use_bias": True}, {"use_bias": False})}
    ),
    "exaone4": TinyFamily(
        sizes={"head_dim": 8},
        logits={
            "exaone4": (_WINDOW, _WINDOW | {"layer_types": [*_KINDS[:3], "full_attention"]}),
            "exaone4-no-window": (
                {"sliding_window": None, "layer_types": ["full_attention"] * 4},
                {"sliding_window": 5},
            ),
        },
    ),
    "olmo3": TinyFamily(
        sizes={"head_dim": 8},
        logits={
            "olmo3": (
                _WINDOW | {"rope_parameters": {"full_attention": _YARN, "sliding_attention": _PLAIN}},
                _WINDOW | {"rope_parameters": {"full_attention": _PLAIN, "sliding_attention": _PLAIN}},
            )
        },
    ),
    "arcee": TinyFamily(logits={"arcee": ({}, {"hidden_act": "relu"}), "arcee-biases": (_BIASES, {"mlp_bias": False})}),
    "glm": TinyFamily(logits={"glm": ({}, {"rope_parameters": _PARTIAL})}),
    "cohere2": TinyFamily(
        sizes={"head_dim": 8},
        logits={"cohere2": (_WINDOW, _WINDOW | {"layer_types": [*_KINDS[:3], "full_attention"]})},
    ),
    "nemotron": TinyFamily(
        logits={
            "nemotron": ({}, {"rope_parameters": _PARTIAL}),
            "nemotron-biases": (_BIASES | {"norm_eps": 0.1}, _BIASES | {"norm_eps": 1e-5}),
        }
    ),
    "hunyuan_v1_dense": TinyFamily(
        logits={
            "hunyuan_v1_dense": (
                {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}},
                {"rope_parameters": _PLAIN},
            ),
            "hunyuan_v1_dense-biases": ({"attention_bias": True}, {"attention_bias": False}),
        },
    ),
    "internlm3": TinyFamily(
        sizes={"head_dim": 8},
        logits={
            "internlm3": (
                {"rope_parameters": _PLAIN | {"rope_type": "dynamic", "factor": 6.0}, "max_position_embeddings": 16},
                {"rope_parameters": _PLAIN},
            ),
            "internlm3-biases": (_BIASES, {"rms_norm_eps": 0.1}),
        },
    ),
    "iquestcoder": TinyFamily(
        sizes={"head_dim": 8},
        logits={"iquestcoder": ({}, {"rms_norm_eps": 0.1}), "iquestcoder-biases": (_BIASES, {"mlp_bias": False})},
    ),
    "mimo": TinyFamily(
        sizes={"head_dim": 8},
        logits={"mimo": ({}, {"rms_norm_eps": 0.1}), "mimo-tied": ({"tie_word_embeddings": True}, None)},
    ),
    "jais2": TinyFamily(logits={"jais2": ({}, {"hidden_act": "gelu"})}),
    "helium": TinyFamily(
        sizes={"head_dim": 8},
        logits={"helium": ({}, {"attention_bias": True}), "helium-biases": (_BIASES, {"mlp_bias": False})},
    ),
    "vaultgemma": TinyFamily(logits={"vaultgemma": ({"sliding_window": 5}, {"sliding_window": 50})}),
    "cwm": TinyFamily(logits={"cwm": ({"sliding_window": 5, "mlp_bias": True}, {"layer_types": _KINDS})}),
    "hyperclovax": TinyFamily(
        logits={
            "hyperclovax": ({"residual_multiplier": 0.5}, {"use_post_norm": False}),
            "hyperclovax-pre": ({"use_post_norm": False, "logits_scaling": 3.0}, {"logits_scaling": 1.0}),
        }
    ),
    "stablelm": TinyFamily(
        sizes={"head_dim": 8, "qk_layernorm": True},
        logits={
            "stablelm": ({"use_qkv_bias": True}, {"qk_layernorm": False}),
            "stablelm-parallel": (
                {"use_parallel_residual": True, "qk_layernorm": False},
                {"rope_parameters": _PARTIAL, "qk_layernorm": False},
            ),
        },
    ),
    "persimmon": TinyFamily(
        sizes={"head_dim": 8},
        logits={
            "persimmon": ({}, {"qk_layernorm": False}),
            "persimmon-plain": ({"qk_layernorm": False}, {"rope_parameters": _PARTIAL, "qk_layernorm": False}),
        },
    ),
    "phi": TinyFamily(
        sizes={"head_dim": 8},
        logits={
            "phi": ({}, {"rope_parameters": _PARTIAL}),
            "phi-qk-norm": ({"qk_layernorm": True}, {"qk_layernorm": False}),
        },
    ),
    "gptj": TinyFamily(sizes=_GPT | {"rotary_dim": 4}, logits={"gptj": ({}, {"rotary_dim": 8})}),
    "codegen": TinyFamily(
        sizes=_GPT | {"rotary_dim": 4, "num_attention_heads": 8, "hidden_size": 64},
        logits={"codegen": ({"n_inner": 48}, {"rotary_dim": 8})},
    ),
    "gpt_bigcode": TinyFamily(
        sizes=_GPT,
        logits={
            "gpt_bigcode": ({}, {"n_inner": 48}),
            "gpt_bigcode-many-groups": ({"multi_query": False, "n_inner": 48}, {"multi_query": True}),
        },
    ),
    "apertus": TinyFamily(logits={"apertus": ({}, {"rope_parameters": _PLAIN | {"rope_theta": 12000000.0}})}),
    "olmo": TinyFamily(
        sizes={"head_dim": 8},
        logits={
            "olmo": ({"clip_qkv": 0.3}, {"clip_qkv": None}),
            "olmo-biases": ({"attention_bias": True}, {"clip_qkv": 0.3}),
        },
        training={"clip_qkv": 0.3},
    ),
    "nanochat": TinyFamily(
        sizes={"head_dim": 8},
        logits={"nanochat": ({}, {"final_logit_softcapping": None, "hidden_act": "relu"})},
    ),
    "opt": TinyFamily(
        sizes={"ffn_dim": 48, "dropout": 0.0},
        logits={
            "opt": ({}, {"activation_function": "gelu"}),
            "opt-no-biases": ({"enable_bias": False}, {"enable_bias": True}),
        },
    ),
    "biogpt": TinyFamily(
        sizes=dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        logits={"biogpt": ({}, {"scale_embedding": False})},
    ),
    "gpt_neo": TinyFamily(
        sizes={"num_hidden_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 5},
        logits={"gpt_neo": ({}, {"window_size": 50})},
    ),
    "youtu": TinyFamily(
        sizes=_LATENT,
        logits={
            "youtu": ({}, {"rope_interleave": False}),
            "youtu-plain": ({"q_lora_rank": None}, {"rms_norm_eps": 0.1}),
        },
    ),
    "minicpm3": TinyFamily(
        sizes=_LATENT | {"dim_model_base": 16},
        logits={"minicpm3": ({}, {"scale_depth": 3.0}), "minicpm3-scales": ({"scale_emb": 3.0}, {"dim_model_base": 8})},
    ),
    "falcon": TinyFamily(
        sizes={"ffn_hidden_size": 48},
        logits={
            "falcon": ({}, {"parallel_attn": False}),
            "falcon-new": ({"new_decoder_architecture": True, "num_kv_heads": 2}, {"num_kv_heads": 4}),
            "falcon-biases": ({"parallel_attn": False, "multi_query": False, "bias": True}, {"bias": False}),
        },
        training={"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "granite_swa": TinyFamily(
        sizes={"head_dim": 8},
        logits={
            "granite_swa": (
                {"sliding_window": 5, "layer_rope_theta": [10000.0, 0, 10000.0, 0], "attention_multiplier": 0.3},
                {"sliding_window": 5, "layer_rope_theta": [10000.0, 0, 10000.0, 10000.0], "attention_multiplier": 0.3},
            )
        },
        training={"sliding_window": 5},
    ),
}
"""Of every family with partial rotary embedding the second settings rotate all channels."""
