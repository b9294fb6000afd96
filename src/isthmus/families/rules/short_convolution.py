"""Rules and config keys shared by the LFM2 families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.families.config_keys import Derived, Key, without
from isthmus.families.rules import decoder, state_space
from isthmus.families.rules.decoder import flag, in_layer, number
from isthmus.families.rules.rule import Rule, in_layers, renamed

_ROWS = ("H", "H", "H")
MIXER = in_layers(
    "short_convolution",
    state_space.sections("mixer.in_proj.weight", "conv.in_proj.weight", _ROWS, "H"),
    state_space.sections(
        *("mixer.in_proj.bias", "conv.in_proj.bias", _ROWS), init="zeros", when="short_convolution.bias"
    ),
    in_layer("mixer.conv1d.weight", "conv.conv.weight", "H", "1", "Sk", shard="rows"),
    in_layer(*("mixer.conv1d.bias", "conv.conv.bias", "H"), shard="rows", init="zeros", when="short_convolution.bias"),
    in_layer("mixer.out_proj.weight", "conv.out_proj.weight", "H", "H", shard="cols"),
    in_layer("mixer.out_proj.bias", "conv.out_proj.bias", "H", init="zeros", when="short_convolution.bias"),
)


def rules(mlp: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """All rules of a model, with the names of LFM2."""
    names = {
        "self_attn.o_proj": "self_attn.out_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.norm": "model.embedding_norm",
        ".mlp.": ".feed_forward.",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    }
    attention = in_layers("attention", *decoder.ATTENTION)
    plain = (*decoder.EMBEDDING, *decoder.INPUT_NORM, *attention, *decoder.MLP_NORM, *mlp, *decoder.HEAD)
    return (*renamed(plain, names), *MIXER)


def _default_types(hf: Mapping[str, Any]) -> list[str]:
    layers = range(Key("num_hidden_layers").read(hf))
    attention = Key("full_attn_idxs", kind=list, default=None, null=lambda _: list(layers)).read(hf)
    return ["full_attention" if layer in attention else "conv" for layer in layers]


_TIED = flag("tie_embedding", default=True)
KEYS = without(decoder.KEYS, "ffn_hidden_size", "tie_embeddings") | {
    "num_query_groups": decoder.kv_heads(default=8),
    "max_position_embeddings": Key("max_position_embeddings", default=128_000),
    "norm_epsilon": number("norm_eps", 1e-5),
    "short_convolution.kernel": Key("conv_L_cache", default=3),
    "short_convolution.bias": flag("conv_bias"),
}
DERIVED: dict[str, Derived] = {
    "mixers": state_space.mixers_by_type(
        {"full_attention": "attention", "conv": "short_convolution"}, default=_default_types
    ),
    # The older key has precedence in transformers.
    "tie_embeddings": Derived(
        lambda hf: (_TIED if "tie_embedding" in hf else flag("tie_word_embeddings", default=True)).read(hf),
        lambda tied, _arch: {"tie_word_embeddings": tied, "tie_embedding": tied},
    ),
}
SHARED: dict[str, Any] = {
    "dropout": {},
    "fixed": decoder.PLAIN_FIXED,
    "traits": {"qk_norm": True},
    "rope_defaults": {"rope_theta": 1e6},
}
"""Other fields of the families."""
