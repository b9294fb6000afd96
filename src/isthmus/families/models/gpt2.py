"""GPT-2: learned positions, LayerNorms, biases in all linear layers, weights stored as [in, out]."""

from dataclasses import replace

from isthmus.families.family import Derived, Family, Fixed, Key, dropout_rates
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, number
from isthmus.families.rules.rule import copy, qkv, renamed

_ATTENTION, _HF_ATTENTION = decoder.LAYER + "self_attention.", "transformer.h.{layer}.attn."
_MLP, _HF_MLP = decoder.LAYER + "mlp.", "transformer.h.{layer}.mlp."
NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.h",
    "post_attention_layernorm": "ln_2",
    "input_layernorm": "ln_1",
    "self_attn.o_proj": "attn.c_proj",
    "model.norm": "transformer.ln_f",
}

(POSITIONS,) = renamed((decoder.POSITIONS,), {"model.embed_positions": "transformer.wpe"})

FAMILY = Family(
    name="gpt2",
    hf_architecture="GPT2LMHeadModel",
    keys={
        "num_layers": Key("n_layer"),
        "hidden_size": Key("n_embd"),
        "ffn_hidden_size": Key("n_inner", null=lambda hf: 4 * hf["n_embd"], default=None),
        "num_attention_heads": Key("n_head"),
        "num_query_groups": Key("n_head"),
        "vocab_size": Key("vocab_size"),
        "max_position_embeddings": Key("n_positions", default=1024),
        "norm_epsilon": number("layer_norm_epsilon", 1e-5),
        "activation": decoder.activation("activation_function", default="gelu_new"),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
        "init_std": number("initializer_range", 0.02),
    },
    derived={"kv_channels": Derived(lambda hf: hf["n_embd"] // hf["n_head"], lambda _width, _arch: {})},
    traits={
        "position": "learned",
        "normalization": "LayerNorm",
        "gated": False,
        "qkv_bias": True,
        "proj_bias": True,
        "mlp_bias": True,
    },
    fixed={
        "scale_attn_weights": Fixed((True,), "attention scores are scaled by the head dim"),
        "scale_attn_by_inverse_layer_idx": Fixed((False,), "attention scores have the same scale in all layers"),
        "reorder_and_upcast_attn": Fixed((False,), "it changes the rounding of attention scores"),
        "add_cross_attention": Fixed((False,), "only decoders without an encoder are supported"),
        "pruned_heads": decoder.FIXED["pruned_heads"],
    },
    dropout=dropout_rates(0.1, attention="attn_pdrop", hidden="resid_pdrop", embedding="embd_pdrop"),
    rules=(
        *renamed(decoder.EMBEDDING, NAMES),
        POSITIONS,
        *renamed(decoder.INPUT_NORM, NAMES),
        qkv(_ATTENTION + "linear_qkv.weight", *(_HF_ATTENTION + "c_attn.weight",) * 3, "H", transposed=True),
        qkv(_ATTENTION + "linear_qkv.bias", *(_HF_ATTENTION + "c_attn.bias",) * 3, init="zeros"),
        replace(renamed((decoder.PROJECTION,), NAMES)[0], transposed=True),
        *renamed((decoder.PROJECTION_BIAS, *decoder.MLP_NORM), NAMES),
        copy(_MLP + "linear_fc1.weight", _HF_MLP + "c_fc.weight", "F", "H", shard="rows", transposed=True),
        copy(_MLP + "linear_fc1.bias", _HF_MLP + "c_fc.bias", "F", shard="rows", init="zeros"),
        copy(_MLP + "linear_fc2.weight", _HF_MLP + "c_proj.weight", "H", "F", shard="cols", transposed=True),
        copy(_MLP + "linear_fc2.bias", _HF_MLP + "c_proj.bias", "H", init="zeros"),
        *renamed(decoder.HEAD, NAMES),
    ),
    ignorable=("attn.bias", "attn.masked_bias"),
)
