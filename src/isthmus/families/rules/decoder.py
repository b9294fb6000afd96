"""Rules and config keys shared by decoder-only families; conditions (``when``) select biases and QK norms."""

from __future__ import annotations

from typing import Any

from isthmus.families.config_keys import Derived, Fixed, Key, without
from isthmus.families.rules.rule import Rule, copy, gate_up, gated_qkv, qkv, where

LAYER, HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."
_ATTENTION, _HF_ATTENTION = LAYER + "self_attention.", HF_LAYER + "self_attn."
_HAS_BIAS = "normalization=LayerNorm and norm_bias"


def in_layer(canonical: str, hf: str, *symbols: str, **fields: Any) -> Rule:
    """Both names are relative to the layer (``model.layers.N.``)."""
    return copy(LAYER + canonical, HF_LAYER + hf, *symbols, **fields)


def norm(canonical: str, hf: str, *symbols: str) -> tuple[Rule, ...]:
    return (
        copy(f"{canonical}.weight", f"{hf}.weight", *(symbols or ("H",)), init="ones"),
        copy(f"{canonical}.bias", f"{hf}.bias", *(symbols or ("H",)), init="zeros", when=_HAS_BIAS),
    )


def layer_norm(canonical: str, hf: str | None = None) -> tuple[Rule, ...]:
    """Both names are relative to the layer, and equal unless ``hf`` is given."""
    return norm(LAYER + canonical, HF_LAYER + (hf or canonical))


def _qk_norm(which: str, heads: str) -> tuple[Rule, ...]:
    canonical, hf = f"{_ATTENTION}{which}_layernorm", f"{_HF_ATTENTION}{which}_norm"
    per_projection = copy(f"{canonical}.weight", f"{hf}.weight", f"{heads}*D", init="ones")
    return (
        *where("qk_norm and qk_norm_over=head", *norm(canonical, hf, "D")),
        *where("qk_norm and qk_norm_over=projection", per_projection),
    )


def mlp(
    canonical: str, hf: str, width: str, *, bias: str | None = None, hidden: str = "H", **fields: Any
) -> tuple[Rule, ...]:
    """A feed-forward block, dense or of one expert.

    ``canonical`` and ``hf`` are prefixes of names, ``width`` and ``hidden`` are symbols, ``bias`` the Architecture's
    field that is true if the block has biases (None: never).
    """
    fc1, fc2 = canonical + "linear_fc1.", canonical + "linear_fc2."
    gate, up, down = hf + "gate_proj.", hf + "up_proj.", hf + "down_proj."
    weights = (
        *where("gated", gate_up(fc1 + "weight", gate + "weight", up + "weight", hidden, width=width, **fields)),
        copy(fc1 + "weight", up + "weight", width, hidden, shard="rows", unless="gated", **fields),
        copy(fc2 + "weight", down + "weight", hidden, width, shard="cols", **fields),
    )
    if bias is None:
        return weights
    fields["init"] = "zeros"
    return weights + where(
        bias,
        *where("gated", gate_up(fc1 + "bias", gate + "bias", up + "bias", width=width, **fields)),
        copy(fc1 + "bias", up + "bias", width, shard="rows", unless="gated", **fields),
        copy(fc2 + "bias", down + "bias", "H", **fields),
    )


EMBEDDING = (copy("embedding.word_embeddings.weight", "model.embed_tokens.weight", "V", "H", shard="vocab"),)
POSITIONS = copy("embedding.position_embeddings.weight", "model.embed_positions.weight", "P", "H")
INPUT_NORM = layer_norm("input_layernorm")
PROJECTION = in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "H", "N*Vh", shard="cols")
PROJECTION_BIAS = in_layer(
    "self_attention.linear_proj.bias", "self_attn.o_proj.bias", "H", init="zeros", when="proj_bias"
)


def each_head_norms(q: str, k: str, **fields: Any) -> tuple[Rule, ...]:
    """QK norms with weights of their own for each head; the names are relative to the layer's attention."""
    names = (("q_layernorm.weight", q, "N"), ("k_layernorm.weight", k, "G"))
    return tuple(
        in_layer(
            f"self_attention.{canonical}", f"self_attn.{hf}", "D", per_head=heads, init="ones", when="qk_norm", **fields
        )
        for canonical, hf, heads in names
    )


QK_NORMS = (*_qk_norm("q", "N"), *_qk_norm("k", "G"))
ATTENTION = (
    qkv(f"{_ATTENTION}linear_qkv.weight", *(f"{_HF_ATTENTION}{name}_proj.weight" for name in "qkv"), "H"),
    PROJECTION,
    *where(
        "qkv_bias",
        qkv(f"{_ATTENTION}linear_qkv.bias", *(f"{_HF_ATTENTION}{name}_proj.bias" for name in "qkv"), init="zeros"),
    ),
    PROJECTION_BIAS,
    *QK_NORMS,
)
GATED_ATTENTION = (
    gated_qkv(f"{_ATTENTION}linear_qkv.weight", *(f"{_HF_ATTENTION}{name}_proj.weight" for name in "qkv"), "H"),
    *where(
        "qkv_bias",
        gated_qkv(
            f"{_ATTENTION}linear_qkv.bias", *(f"{_HF_ATTENTION}{name}_proj.bias" for name in "qkv"), init="zeros"
        ),
    ),
    *(rule for rule in ATTENTION if "linear_qkv" not in rule.canonical),
)
"""Attention with an output gate, whose rows follow those of the queries in each head of ``q_proj``."""
MLP_NORM = layer_norm("pre_mlp_layernorm", "post_attention_layernorm")
MLP = mlp(LAYER + "mlp.", HF_LAYER + "mlp.", "F", bias="mlp_bias")
FUSED_MLP = (
    gate_up(LAYER + "mlp.linear_fc1.weight", *(HF_LAYER + "mlp.gate_up_proj.weight",) * 2, "H"),
    in_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", "H", "F", shard="cols"),
)
HEAD = (
    *norm("decoder.final_layernorm", "model.norm"),
    copy("output_layer.weight", "lm_head.weight", "V", "H", shard="vocab", unless="tie_embeddings"),
    # In a tied model the last pipeline stage has its own copy of the embedding.
    copy(
        "output_layer.weight", "model.embed_tokens.weight", "V", "H", shard="vocab", when="tie_embeddings", alias=True
    ),
    copy("output_layer.bias", "lm_head.bias", "V", shard="vocab", init="zeros", when="output_bias"),
)


def pre_norm_rules(*, attention: tuple[Rule, ...] = ATTENTION, mlp: tuple[Rule, ...] = MLP) -> tuple[Rule, ...]:
    """All rules of a model with one norm before attention and one before the feed-forward block."""
    return (*EMBEDDING, *INPUT_NORM, *attention, *MLP_NORM, *mlp, *HEAD)


RULES = pre_norm_rules()


def without_norms(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules of a model whose norms have no weights."""
    return tuple(rule for rule in rules if "layernorm." not in rule.canonical)


def kv_heads(default: int | None) -> Key:
    """``num_key_value_heads``: null means as many as query heads, absence means ``default``."""
    return Key("num_key_value_heads", default=default, null=lambda hf: hf["num_attention_heads"])


def flag(name: str, default: bool = False) -> Key:
    return Key(name, kind=bool, default=default)


def number(name: str, default: float | None, *, optional: bool = False) -> Key:
    """Key of a number; with ``optional`` or the default None, null means None."""
    return Key(name, kind=float, default=default, optional=optional or default is None)


KEYS = {
    "num_layers": Key("num_hidden_layers"),
    "hidden_size": Key("hidden_size"),
    "ffn_hidden_size": Key("intermediate_size"),
    "num_attention_heads": Key("num_attention_heads"),
    "num_query_groups": kv_heads(default=None),
    "kv_channels": Key("head_dim", null=lambda hf: hf["hidden_size"] // hf["num_attention_heads"]),
    "vocab_size": Key("vocab_size"),
    "max_position_embeddings": Key("max_position_embeddings"),
    "norm_epsilon": number("rms_norm_eps", 1e-6),
    "tie_embeddings": flag("tie_word_embeddings"),
    "init_std": number("initializer_range", 0.02),
}
"""Defaults are those of transformers."""
ATTENTION_BIAS = {"qkv_bias": flag("attention_bias"), "proj_bias": flag("attention_bias")}
"""One key for the biases of all attention projections."""
BIASED: dict[str, Any] = {"qkv_bias": True, "proj_bias": True, "mlp_bias": True}
"""Biases of all linear layers."""
HEAD_DIM = Derived(lambda hf: hf["hidden_size"] // hf["num_attention_heads"], lambda _width, _arch: {})
"""The width of a head in configs without ``head_dim``."""

_PLAIN = {"silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2"}
_GELUS = dict.fromkeys(("gelu", "gelu_python"), "gelu") | dict.fromkeys(
    ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_accurate"), "gelu_tanh"
)


def activation(name: str, default: str) -> Key:
    words = _PLAIN | _GELUS
    return Key(name, default=default, choices={default: words[default]} | words)


FIXED = {
    "hidden_act": Fixed(("silu", "swish"), "only the gated SiLU MLP is supported for this family"),
    "pruned_heads": Fixed((None, {}), "models with pruned heads are not supported"),
}
"""Settings with one supported value; other values are rejected with the reason."""

NO_MLP_DROPOUT = Fixed((0.0,), "dropout of the feed-forward block alone is not supported", training=True)
PLAIN_FIXED = without(FIXED, "hidden_act")
