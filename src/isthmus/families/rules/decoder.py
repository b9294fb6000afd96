"""What the dense decoders of the Llama line share; a family adds or replaces what is its own."""

from __future__ import annotations

from isthmus.families.family import Fixed, Key
from isthmus.families.rules.rule import Rule, copy, gate_up, qkv

_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."
_ATTENTION = _LAYER + "self_attention."
_HF_ATTENTION = _HF_LAYER + "self_attn."
_HAS_BIAS = "normalization=LayerNorm and norm_bias"


def norm(canonical: str, hf: str, *symbols: str) -> tuple[Rule, ...]:
    """Weight and, of a LayerNorm that has one, bias of a norm."""
    return (
        copy(f"{canonical}.weight", f"{hf}.weight", *(symbols or ("H",)), init="ones"),
        copy(f"{canonical}.bias", f"{hf}.bias", *(symbols or ("H",)), init="zeros", when=_HAS_BIAS),
    )


def tied_output(embedding: str) -> Rule:
    """The last pipeline stage of a tied model holds its own copy of the embedding."""
    return copy("output_layer.weight", embedding, "V", "H", shard="vocab", when="tie_embeddings", alias=True)


EMBEDDING = (copy("embedding.word_embeddings.weight", "model.embed_tokens.weight", "V", "H", shard="vocab"),)
INPUT_NORM = (copy(_LAYER + "input_layernorm.weight", _HF_LAYER + "input_layernorm.weight", "H", init="ones"),)
ATTENTION = (
    qkv(
        _ATTENTION + "linear_qkv.weight",
        _HF_ATTENTION + "q_proj.weight",
        _HF_ATTENTION + "k_proj.weight",
        _HF_ATTENTION + "v_proj.weight",
        "H",
    ),
    copy(_ATTENTION + "linear_proj.weight", _HF_ATTENTION + "o_proj.weight", "H", "N*D", shard="cols"),
)
# Of these a family has those that its configs or its traits ask for.
QKV_BIAS = (
    qkv(
        _ATTENTION + "linear_qkv.bias",
        _HF_ATTENTION + "q_proj.bias",
        _HF_ATTENTION + "k_proj.bias",
        _HF_ATTENTION + "v_proj.bias",
        init="zeros",
        when="qkv_bias",
    ),
)
PROJ_BIAS = (copy(_ATTENTION + "linear_proj.bias", _HF_ATTENTION + "o_proj.bias", "H", init="zeros", when="proj_bias"),)
MLP_BIAS = (
    gate_up(
        _LAYER + "mlp.linear_fc1.bias",
        _HF_LAYER + "mlp.gate_proj.bias",
        _HF_LAYER + "mlp.up_proj.bias",
        init="zeros",
        when="mlp_bias",
    ),
    copy(_LAYER + "mlp.linear_fc2.bias", _HF_LAYER + "mlp.down_proj.bias", "H", init="zeros", when="mlp_bias"),
)
QK_NORM = (
    copy(_ATTENTION + "q_layernorm.weight", _HF_ATTENTION + "q_norm.weight", "D", init="ones"),
    copy(_ATTENTION + "k_layernorm.weight", _HF_ATTENTION + "k_norm.weight", "D", init="ones"),
)
GATED_MLP = (
    copy(_LAYER + "pre_mlp_layernorm.weight", _HF_LAYER + "post_attention_layernorm.weight", "H", init="ones"),
    gate_up(
        _LAYER + "mlp.linear_fc1.weight", _HF_LAYER + "mlp.gate_proj.weight", _HF_LAYER + "mlp.up_proj.weight", "H"
    ),
    copy(_LAYER + "mlp.linear_fc2.weight", _HF_LAYER + "mlp.down_proj.weight", "H", "F", shard="cols"),
)
FUSED_GATED_MLP = (
    GATED_MLP[0],
    gate_up(
        _LAYER + "mlp.linear_fc1.weight",
        _HF_LAYER + "mlp.gate_up_proj.weight",
        _HF_LAYER + "mlp.gate_up_proj.weight",
        "H",
    ),
    GATED_MLP[2],
)
HEAD = (
    copy("decoder.final_layernorm.weight", "model.norm.weight", "H", init="ones"),
    copy("output_layer.weight", "lm_head.weight", "V", "H", shard="vocab", unless="tie_embeddings"),
    tied_output("model.embed_tokens.weight"),
)


def kv_heads(default: int | None) -> Key:
    """Key/value heads: as many as query heads where the config says null, ``default`` where it says nothing."""
    return Key("num_key_value_heads", default=default, null=lambda hf: hf["num_attention_heads"])


def flag(name: str, default: bool = False) -> Key:
    """A switch."""
    return Key(name, kind=bool, default=default)


KEYS = {
    "num_layers": Key("num_hidden_layers"),
    "hidden_size": Key("hidden_size"),
    "ffn_hidden_size": Key("intermediate_size"),
    "num_attention_heads": Key("num_attention_heads"),
    "num_query_groups": kv_heads(default=None),
    "kv_channels": Key("head_dim", null=lambda hf: hf["hidden_size"] // hf["num_attention_heads"]),
    "vocab_size": Key("vocab_size"),
    "max_position_embeddings": Key("max_position_embeddings"),
    "norm_epsilon": Key("rms_norm_eps", kind=float, default=1e-6),
    "tie_embeddings": Key("tie_word_embeddings", kind=bool, default=False),
    "init_std": Key("initializer_range", kind=float, default=0.02),
}
"""Fields of the Architecture under their Hugging Face names, with what transformers takes where a name is absent."""

_GELUS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def activation(name: str, default: str) -> Key:
    """The activation of an MLP, which a family does not have fixed; of words with one meaning it writes its own."""
    words = {"silu": "silu", "swish": "silu"} | _GELUS
    return Key(name, default=default, choices={default: words[default]} | words)


NO_DROPOUT = Fixed((0.0,), "training runs without dropout; set it to 0", training=True)
FIXED = {
    "hidden_act": Fixed(("silu", "swish"), "only the gated SiLU MLP is built for this family"),
    "attention_dropout": NO_DROPOUT,
    "pruned_heads": Fixed((None, {}), "heads of unequal number cannot be cut evenly"),
}
"""Hugging Face settings that have one meaning here; any other value is refused with the reason."""

PLAIN_FIXED = {name: fixed for name, fixed in FIXED.items() if name != "hidden_act"}
"""The same for a family with a choice of activations."""

IGNORABLE = ("rotary_emb.inv_freq", "attn.masked_bias")
"""Endings of tensors that old files carry and that are computed, not learned."""
