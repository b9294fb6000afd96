"""AFMoE (Trinity): gated attention, layers without a window or rotary embedding, sandwich norms, sigmoid routing."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Derived, Family, Fixed, Key, with_defaults
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import HF_LAYER, LAYER, flag, layer_norm, number
from isthmus.families.rules.rule import HfPart, Rule, renamed
from isthmus.families.rules.unrotated import unrotated_full_layers

_SHAPES = (("q", "N*D"), ("gate", "N*Vh"), ("k", "G*D"), ("v", "G*Vh"))
_QKV = Rule(
    canonical=LAYER + "self_attention.linear_qkv.weight",
    parts=tuple(HfPart(f"{HF_LAYER}self_attn.{name}_proj.weight", (rows, "H")) for name, rows in _SHAPES),
    shard="heads",
    strands="G",
)
_NAMES = {"mlp.gate.e_score_correction_bias": "mlp.expert_bias", "mlp.gate.": "mlp.router.gate."}


def _multiplier(hf: Mapping[str, Any]) -> float:
    return math.sqrt(hf["hidden_size"]) if flag("mup_enabled").read(hf) else 1.0


def _enabled(multiplier: float, arch: Architecture) -> dict[str, Any]:
    if multiplier not in (1.0, math.sqrt(arch.hidden_size)):
        raise UsageError(f"config.json cannot express embedding_multiplier={multiplier:g} ({arch.family}).")
    return {"mup_enabled": multiplier != 1.0}


FAMILY = Family(
    name="afmoe",
    hf_architecture="AfmoeForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=16384, rms_norm_eps=1e-5)
    | {
        "kv_channels": Key("head_dim", default=128),
        "moe.num_experts": Key("num_experts", default=64),
        "moe.top_k": Key("num_experts_per_tok", default=6),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=1408),
        "moe.shared_ffn_hidden_size": expert_tensors.shared_width("num_shared_experts", default=2),
        "moe.scaling_factor": number("route_scale", 1.0),
        "moe.dense_layers": replace(expert_tensors.first_dense(default=1), hf="num_dense_layers"),
    },
    fixed=decoder.FIXED
    | {
        "attention_bias": Fixed((False,), "biases beside gates without them are not supported"),
        "global_attn_every_n_layers": Fixed((4,), "other layers without a window are not supported"),
    },
    traits={
        "form": "sandwich",
        "qk_norm": True,
        "attention_gate": True,
        "moe.score": "sigmoid",
        "moe.expert_bias": True,
        "moe.normalize": True,
    },
    derived={
        "embedding_multiplier": Derived(_multiplier, _enabled),
        "unrotated_layers": unrotated_full_layers(window=1024, pattern=4, null_rotates=False),
    },
    sliding_window="pattern",
    sliding_window_default=1024,
    sliding_window_pattern=4,
    rules=(
        *decoder.EMBEDDING,
        *decoder.INPUT_NORM,
        _QKV,
        *decoder.ATTENTION[1:],
        *layer_norm("post_self_attn_layernorm", "post_attention_layernorm"),
        *layer_norm("pre_mlp_layernorm"),
        *renamed(expert_tensors.DENSE_AND_MOE, _NAMES),
        *layer_norm("post_mlp_layernorm"),
        *decoder.HEAD,
    ),
)
