"""Dense decoders."""

from __future__ import annotations

from typing import Any

from ranks.tiny_families.tiny_family import TinyFamily

_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
_WINDOW: dict[str, Any] = {"sliding_window": 5, "layer_types": _KINDS}
_PARTIAL = _PLAIN | {"partial_rotary_factor": 1.0}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_GPT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

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
        sizes={"head_dim": 8},
        logits={
            "stablelm": ({}, {"rope_parameters": _PARTIAL}),
            "stablelm-parallel": ({"use_parallel_residual": True, "use_qkv_bias": True}, {"use_qkv_bias": False}),
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
    "gpt_bigcode": TinyFamily(
        sizes=_GPT,
        logits={
            "gpt_bigcode": ({}, {"n_inner": 48}),
            "gpt_bigcode-many-groups": ({"multi_query": False, "n_inner": 48}, {"multi_query": True}),
        },
    ),
}
"""Of every family with partial rotary embedding the second settings rotate all channels."""
