"""OLMo Hybrid: gated delta nets with pre-norms; every fourth layer attention of OLMo 3 with post-norms."""

from collections.abc import Mapping
from typing import Any

from isthmus.families.family import Derived, Family, Key, with_defaults
from isthmus.families.rules import decoder, delta_net
from isthmus.families.rules.decoder import flag, layer_norm
from isthmus.families.rules.delta_net import FULL, LINEAR
from isthmus.families.rules.rule import in_layers

_PROJECTION = delta_net.in_proj(
    *(("q_proj", "Lk"), ("k_proj", "Lk"), ("v_proj", "Lv"), ("g_proj", "Lv"), ("b_proj", "Ln"), ("a_proj", "Ln"))
)


def _heads(name: str) -> Key:
    return Key(name, default=None, null=lambda hf: hf["num_attention_heads"])


def _key_head_dim(hf: Mapping[str, Any]) -> int:
    return int(0.75 * hf["hidden_size"] / _heads("linear_num_key_heads").read(hf))


_KEY_DIM = Key("linear_key_head_dim", default=None, null=_key_head_dim)


def _layer_types(hf: Mapping[str, Any]) -> list[str]:
    """Every fourth layer has attention, or the last one if there are fewer."""
    layers = range(Key("num_hidden_layers").read(hf))
    return [FULL if layer % 4 == 3 or (layer == layers[-1] < 3) else LINEAR for layer in layers]


def _position(hf: Mapping[str, Any]) -> str:
    """The published models have null in place of a rotary base, and no positions."""
    rope = hf.get("rope_parameters")
    settings = rope if isinstance(rope, Mapping) and "rope_theta" in rope else hf
    return "none" if settings.get("rope_theta", 0) is None else "rope"


FAMILY = Family(
    name="olmo_hybrid",
    hf_architecture="OlmoHybridForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=65536)
    | decoder.ATTENTION_BIAS
    | {
        "delta_net.num_key_heads": _heads("linear_num_key_heads"),
        "delta_net.num_value_heads": _heads("linear_num_value_heads"),
        "delta_net.key_head_dim": _KEY_DIM,
        "delta_net.value_head_dim": Key("linear_value_head_dim", default=None, null=lambda hf: 2 * _KEY_DIM.read(hf)),
        "delta_net.conv_kernel": Key("linear_conv_kernel_dim", default=4),
        "delta_net.negative_eigenvalues": flag("linear_allow_neg_eigval", True),
    },
    fixed=decoder.FIXED,
    traits={
        **{"form": "post", "form_without_attention": "pre", "qk_norm": True, "qk_norm_over": "projection"},
        "delta_net.norm_epsilon": 1e-5,
    },
    derived={
        "mixers": delta_net.mixers("gated_delta_net", _layer_types),
        "position": Derived(
            _position,
            lambda position, _arch: {"rope_parameters": None, "rope_theta": None} if position == "none" else {},
        ),
    },
    # Written by transformers, which also renames norms of attention in the way that norms of delta nets are read.
    other_names={
        "input_layernorm": "attention_layer_norm",
        "feedforward_layer_norm": "post_attention_layernorm",
        "post_attention_layernorm": "feedforward_layer_norm",
    },
    rules=(
        *decoder.EMBEDDING,
        *in_layers("gated_delta_net", *layer_norm("input_layernorm", "attention_layer_norm")),
        *in_layers(
            "attention", *decoder.ATTENTION, *layer_norm("post_self_attn_layernorm", "post_attention_layernorm")
        ),
        *delta_net.mixer_rules(
            _PROJECTION,
            norm="o_norm",
            out="o_proj",
            time_step="time_step",
            convolutions=("q_conv1d", "k_conv1d", "v_conv1d"),
        ),
        *in_layers("gated_delta_net", *layer_norm("pre_mlp_layernorm", "feedforward_layer_norm")),
        *decoder.MLP,
        *in_layers("attention", *layer_norm("post_mlp_layernorm", "post_feedforward_layernorm")),
        *decoder.HEAD,
    ),
)
