"""Models that transformers has no class for: every field of the Architecture in config.json, Llama's names.

They are exported with the modelling files of ``hf/shim``, which do what is said here. A field of the Architecture that
has no key here is one that those files do not know; a model that needs it is refused, see ``family_transfer``.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isthmus.errors import DataError
from isthmus.families.architecture import Architecture, Moe
from isthmus.families.family import Derived, Family, Key
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import flag, norm
from isthmus.families.rules.rule import Layers, Rule, copy, gate_up, where

_LAYER, _HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."
_ATTENTION, _HF_ATTENTION = _LAYER + "self_attention.", _HF_LAYER + "self_attn."
_MLP, _HF_MLP = _LAYER + "mlp.", _HF_LAYER + "mlp."
_EXPERT, _HF_EXPERT = _MLP + "experts.local_experts.{expert}.", _HF_MLP + "experts.{expert}."


_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "clamped_swiglu": "clamped_swiglu"}


def _word(name: str, *words: str, default: str) -> Key:
    return Key(name, default=default, choices={word: word for word in words})


def _number(name: str, default: float | None) -> Key:
    return Key(name, kind=float, default=default, optional=default is None)


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
    "score": _word("scoring_func", "softmax", "sigmoid", "softmax_of_chosen", default="softmax"),
    "normalize": flag("norm_topk_prob"),
    "normalize_min": _number("norm_topk_min", 1e-20),
    "scaling_factor": _number("routed_scaling_factor", 1.0),
    "expert_bias": flag("router_expert_bias"),
    "num_groups": Key("n_group", default=1),
    "group_top_k": Key("topk_group", default=1),
    "group_score": _word("group_score", "top2", "max", default="top2"),
    "router_bias": flag("router_bias"),
    "router_float32": flag("router_float32"),
    "expert_mlp_bias": flag("expert_mlp_bias"),
}
_DENSE_LAYERS = _layers("mlp_only_layers")


def _read_moe(hf: Mapping[str, Any]) -> Moe | None:
    if not hf.get("num_experts"):
        return None
    return Moe(dense_layers=_DENSE_LAYERS.read(hf), **{name: key.read(hf) for name, key in _MOE.items()})


def _write_moe(moe: Moe | None, arch: Architecture) -> Mapping[str, Any]:
    if moe is None:
        return {"num_experts": 0}
    said = {key.hf: key.write(getattr(moe, name), arch) for name, key in _MOE.items()}
    return {**said, **_DENSE_LAYERS.write(moe.dense_layers, arch)}


def _mlp(canonical: str, hf: str, width: str, layers: Layers, bias: str | None) -> tuple[Rule, ...]:
    """A feed-forward block or one expert; ``bias`` is the field that says whether it has biases."""
    how: dict[str, Any] = {"layers": layers}
    fc1, fc2, gate, up, down = (
        *(canonical + name for name in ("linear_fc1.", "linear_fc2.")),
        *(hf + name for name in ("gate_proj.", "up_proj.", "down_proj.")),
    )
    weights = (
        gate_up(fc1 + "weight", gate + "weight", up + "weight", "H", width=width, when="gated", **how),
        copy(fc1 + "weight", up + "weight", width, "H", shard="rows", unless="gated", **how),
        copy(fc2 + "weight", down + "weight", "H", width, shard="cols", **how),
    )
    if bias is None:
        return weights
    how["init"] = "zeros"
    return weights + where(
        bias,
        gate_up(fc1 + "bias", gate + "bias", up + "bias", width=width, when="gated", **how),
        copy(fc1 + "bias", up + "bias", width, shard="rows", unless="gated", **how),
        copy(fc2 + "bias", down + "bias", "H", **how),
    )


def _qk_norm(which: str, heads: str) -> tuple[Rule, ...]:
    canonical, hf = f"{_ATTENTION}{which}_layernorm", f"{_HF_ATTENTION}{which}_norm"
    over_all = copy(f"{canonical}.weight", f"{hf}.weight", f"{heads}*D", init="ones")
    of_head = where("qk_norm and qk_norm_over=head", *norm(canonical, hf, "D"))
    return of_head + where("qk_norm and qk_norm_over=projection", over_all)


FAMILY = Family(
    name="isthmus",
    hf_architecture="IsthmusForCausalLM",
    auto_map={
        "AutoConfig": "configuration_isthmus.IsthmusConfig",
        "AutoModel": "modeling_isthmus.IsthmusModel",
        "AutoModelForCausalLM": "modeling_isthmus.IsthmusForCausalLM",
    },
    keys=decoder.KEYS
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=2048),
        "norm_epsilon": Key("norm_epsilon", kind=float, default=1e-5),
        "position": _word("position_embedding_type", "rope", "learned", default="rope"),
        "rotary_interleaved": flag("rotary_interleaved"),
        "window_rotary_base": _number("window_rope_theta", None),
        "normalization": _word("normalization", "RMSNorm", "LayerNorm", default="RMSNorm"),
        "norm_bias": flag("norm_bias", default=True),
        "norm_zero_centered": flag("norm_zero_centered"),
        "form": _word("layer_form", "pre", "post", "sandwich", "parallel", "parallel_two_norms", default="pre"),
        "qkv_bias": flag("qkv_bias"),
        "proj_bias": flag("proj_bias"),
        "qk_norm": flag("qk_norm"),
        "qk_norm_over": _word("qk_norm_over", "head", "projection", default="head"),
        "attention_scale": _number("attention_scale", None),
        "attention_softcap": _number("attention_softcap", None),
        "attention_sinks": flag("attention_sinks"),
        "activation": Key("hidden_act", default="silu", choices=_ACTIVATIONS),
        "gated": flag("gated_mlp", default=True),
        "mlp_bias": flag("mlp_bias"),
        "embedding_multiplier": _number("embedding_multiplier", 1.0),
        "residual_multiplier": _number("residual_multiplier", 1.0),
        "logits_multiplier": _number("logits_multiplier", 1.0),
        "logits_softcap": _number("logits_softcap", None),
    },
    fixed={"pruned_heads": decoder.FIXED["pruned_heads"]},
    derived={"unrotated_layers": _layers("unrotated_layers"), "moe": Derived(_read_moe, _write_moe)},
    sliding_window="pattern",
    rope_defaults={"partial_rotary_factor": 1.0},
    rules=(
        *decoder.EMBEDDING,
        copy("embedding.position_embeddings.weight", "model.embed_positions.weight", "P", "H", when="position=learned"),
        *where(
            "form=pre|sandwich|parallel|parallel_two_norms",
            *norm(_LAYER + "input_layernorm", _HF_LAYER + "input_layernorm"),
        ),
        *decoder.ATTENTION,
        *decoder.QKV_BIAS,
        *decoder.PROJ_BIAS,
        *_qk_norm("q", "N"),
        *_qk_norm("k", "G"),
        *where(
            "attention_sinks",
            copy(_ATTENTION + "core_attention.softmax_offset", _HF_ATTENTION + "sinks", "N", shard="rows"),
        ),
        *where(
            "form=post|sandwich",
            *norm(_LAYER + "post_self_attn_layernorm", _HF_LAYER + "post_self_attn_layernorm"),
        ),
        # As in Llama, the name says what comes before it.
        *where(
            "form=pre|sandwich|parallel_two_norms",
            *norm(_LAYER + "pre_mlp_layernorm", _HF_LAYER + "post_attention_layernorm"),
        ),
        *_mlp(_MLP, _HF_MLP, "F", "dense", "mlp_bias"),
        *(replace(rule, unless="moe.router_float32") for rule in expert_tensors.ROUTER),
        *(replace(rule, when="moe.router_float32", dtype="float32") for rule in expert_tensors.ROUTER),
        copy(_MLP + "router.bias", _HF_MLP + "gate.bias", "E", layers="moe", init="zeros", when="moe.router_bias"),
        *where("moe.expert_bias", *expert_tensors.EXPERT_BIAS),
        *_mlp(_EXPERT, _HF_EXPERT, "X", "moe", "moe.expert_mlp_bias"),
        *where(
            "moe.shared_ffn_hidden_size",
            *_mlp(_MLP + "shared_experts.", _HF_MLP + "shared_experts.", "S", "moe", None),
            copy(
                _MLP + "shared_experts.gate_weight",
                _HF_MLP + "shared_expert_gate.weight",
                "1",
                "H",
                layers="moe",
                when="moe.shared_gate",
            ),
        ),
        *where("form=post|sandwich", *norm(_LAYER + "post_mlp_layernorm", _HF_LAYER + "post_mlp_layernorm")),
        *norm("decoder.final_layernorm", "model.norm"),
        *decoder.HEAD[1:],
    ),
    ignorable=decoder.IGNORABLE,
)
