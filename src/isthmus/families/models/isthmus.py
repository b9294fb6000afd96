"""Models that no class of transformers can represent: every field of the Architecture is a key of config.json.

They are exported with the modelling files of ``hf/shim``, which implement these keys. A model with a field that has no
key here cannot be exported (``family_transfer``).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isthmus.errors import DataError
from isthmus.families.architecture import Architecture
from isthmus.families.blocks.feed_forward import Experts
from isthmus.families.family import Derived, Family, Key, with_defaults
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import flag, in_layer, layer_norm, number
from isthmus.families.rules.rule import where

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "clamped_swiglu": "clamped_swiglu"}


def _choice(name: str, *values: str, default: str) -> Key:
    return Key(name, default=default, choices={value: value for value in values})


def _layers(name: str) -> Derived:
    """A list of layers, counted from 0."""

    def read(hf: Mapping[str, Any]) -> tuple[int, ...]:
        listed = hf.get(name) or []
        if not isinstance(listed, list) or not all(isinstance(layer, int) and layer >= 0 for layer in listed):
            raise DataError(f"config.json: {name} must be a list of layers, counted from 0, got {listed!r}.")
        return tuple(listed)

    return Derived(read, lambda listed, _: {name: list(listed)})


_MOE = {
    "num_experts": Key("num_experts"),
    "top_k": Key("num_experts_per_tok", default=2),
    "ffn_hidden_size": Key("moe_intermediate_size", default=None, null=lambda hf: hf.get("intermediate_size")),
    "shared_ffn_hidden_size": Key("shared_expert_intermediate_size", default=0, least=0),
    "shared_gate": flag("shared_expert_gate"),
    "score": _choice("scoring_func", "softmax", "sigmoid", "softmax_of_chosen", default="softmax"),
    "normalize": flag("norm_topk_prob"),
    "normalize_min": number("norm_topk_min", 1e-20),
    "scaling_factor": number("routed_scaling_factor", 1.0),
    "expert_bias": flag("router_expert_bias"),
    "num_groups": Key("n_group", default=1),
    "group_top_k": Key("topk_group", default=1),
    "group_score": _choice("group_score", "top2", "max", default="top2"),
    "router_bias": flag("router_bias"),
    "router_float32": flag("router_float32"),
    "expert_mlp_bias": flag("expert_mlp_bias"),
    "output_bias": flag("moe_output_bias"),
}
_DENSE_LAYERS = _layers("mlp_only_layers")


def _read_moe(hf: Mapping[str, Any]) -> Experts | None:
    if not hf.get("num_experts"):
        return None
    return Experts(dense_layers=_DENSE_LAYERS.read(hf), **{name: key.read(hf) for name, key in _MOE.items()})


def _write_moe(moe: Experts | None, arch: Architecture) -> Mapping[str, Any]:
    if moe is None:
        return {"num_experts": 0}
    keys = {key.hf: key.write(getattr(moe, name), arch) for name, key in _MOE.items()}
    return {**keys, **_DENSE_LAYERS.write(moe.dense_layers, arch)}


FAMILY = Family(
    name="isthmus",
    hf_architecture="IsthmusForCausalLM",
    auto_map={
        "AutoConfig": "configuration_isthmus.IsthmusConfig",
        "AutoModel": "modeling_isthmus.IsthmusModel",
        "AutoModelForCausalLM": "modeling_isthmus.IsthmusForCausalLM",
    },
    keys=with_defaults(decoder.KEYS, max_position_embeddings=2048)
    | {
        "norm_epsilon": number("norm_epsilon", 1e-5),
        "position": _choice("position_embedding_type", "rope", "learned", default="rope"),
        "rotary_interleaved": flag("rotary_interleaved"),
        "window_rotary_base": number("window_rope_theta", None),
        "normalization": _choice("normalization", "RMSNorm", "LayerNorm", default="RMSNorm"),
        "norm_bias": flag("norm_bias", default=True),
        "norm_zero_centered": flag("norm_zero_centered"),
        "form": _choice("layer_form", "pre", "post", "sandwich", "parallel", "parallel_two_norms", default="pre"),
        "qkv_bias": flag("qkv_bias"),
        "proj_bias": flag("proj_bias"),
        "qk_norm": flag("qk_norm"),
        "qk_norm_over": _choice("qk_norm_over", "head", "projection", default="head"),
        "attention_scale": number("attention_scale", None),
        "attention_softcap": number("attention_softcap", None),
        "attention_sinks": flag("attention_sinks"),
        "activation": Key("hidden_act", default="silu", choices=_ACTIVATIONS),
        "gated": flag("gated_mlp", default=True),
        "mlp_bias": flag("mlp_bias"),
        "embedding_multiplier": number("embedding_multiplier", 1.0),
        "residual_multiplier": number("residual_multiplier", 1.0),
        "logits_multiplier": number("logits_multiplier", 1.0),
        "logits_softcap": number("logits_softcap", None),
    },
    dropout={},
    fixed={"pruned_heads": decoder.FIXED["pruned_heads"]},
    derived={"unrotated_layers": _layers("unrotated_layers"), "moe": Derived(_read_moe, _write_moe)},
    sliding_window="pattern",
    rope_defaults={"partial_rotary_factor": 1.0},
    rules=(
        *decoder.EMBEDDING,
        *where("position=learned", decoder.POSITIONS),
        *where("form=pre|sandwich|parallel|parallel_two_norms", *decoder.INPUT_NORM),
        *decoder.ATTENTION,
        in_layer(
            "self_attention.core_attention.softmax_offset", "self_attn.sinks", "N", shard="rows", when="attention_sinks"
        ),
        *where("form=post|sandwich", *layer_norm("post_self_attn_layernorm")),
        # The Hugging Face name tells what precedes the norm, as in Llama.
        *where("form=pre|sandwich|parallel_two_norms", *decoder.MLP_NORM),
        *expert_tensors.DENSE,
        *(replace(rule, unless="moe.router_float32") for rule in expert_tensors.ROUTER),
        *(replace(rule, when="moe.router_float32", dtype="float32") for rule in expert_tensors.ROUTER),
        in_layer("mlp.router.bias", "mlp.gate.bias", "E", layers="moe", init="zeros", when="moe.router_bias"),
        in_layer("mlp.output_bias", "mlp.output_bias", "H", layers="moe", init="zeros", when="moe.output_bias"),
        *expert_tensors.EXPERT_BIAS,
        *expert_tensors.EXPERTS,
        *expert_tensors.SHARED_EXPERTS,
        expert_tensors.SHARED_GATE,
        *where("form=post|sandwich", *layer_norm("post_mlp_layernorm")),
        *decoder.HEAD,
    ),
)
