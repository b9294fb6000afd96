"""GPT-2: learned positions, LayerNorms, biases everywhere, weights stored as [in, out]."""

from isthmus.families.family import Derived, Family, Fixed, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag
from isthmus.families.rules.rule import copy, qkv

_LAYER, _HF = "decoder.layers.{layer}.", "transformer.h.{layer}."
_ATTENTION, _HF_ATTENTION = _LAYER + "self_attention.", _HF + "attn."
_QKV = _HF_ATTENTION + "c_attn"
_DROPOUT = Fixed(decoder.NO_DROPOUT.allowed, decoder.NO_DROPOUT.why, training=True, absent=0.1)

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
        "norm_epsilon": Key("layer_norm_epsilon", kind=float, default=1e-5),
        "activation": decoder.activation("activation_function", default="gelu_new"),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
        "init_std": Key("initializer_range", kind=float, default=0.02),
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
        "scale_attn_weights": Fixed((True,), "scores are scaled by the width of a head"),
        "scale_attn_by_inverse_layer_idx": Fixed((False,), "scores are scaled alike in all layers"),
        "reorder_and_upcast_attn": Fixed((False,), "it changes how scores are rounded"),
        "add_cross_attention": Fixed((False,), "only decoders without an encoder are built"),
        "attn_pdrop": _DROPOUT,
        "embd_pdrop": _DROPOUT,
        "resid_pdrop": _DROPOUT,
        "pruned_heads": decoder.FIXED["pruned_heads"],
    },
    rules=(
        copy("embedding.word_embeddings.weight", "transformer.wte.weight", "V", "H", shard="vocab"),
        copy("embedding.position_embeddings.weight", "transformer.wpe.weight", "P", "H"),
        *decoder.norm(_LAYER + "input_layernorm", _HF + "ln_1"),
        qkv(_ATTENTION + "linear_qkv.weight", *(_QKV + ".weight",) * 3, "H", transposed=True),
        qkv(_ATTENTION + "linear_qkv.bias", *(_QKV + ".bias",) * 3, init="zeros"),
        copy(
            _ATTENTION + "linear_proj.weight",
            _HF_ATTENTION + "c_proj.weight",
            "H",
            "N*D",
            shard="cols",
            transposed=True,
        ),
        copy(_ATTENTION + "linear_proj.bias", _HF_ATTENTION + "c_proj.bias", "H", init="zeros"),
        *decoder.norm(_LAYER + "pre_mlp_layernorm", _HF + "ln_2"),
        copy(_LAYER + "mlp.linear_fc1.weight", _HF + "mlp.c_fc.weight", "F", "H", shard="rows", transposed=True),
        copy(_LAYER + "mlp.linear_fc1.bias", _HF + "mlp.c_fc.bias", "F", shard="rows", init="zeros"),
        copy(_LAYER + "mlp.linear_fc2.weight", _HF + "mlp.c_proj.weight", "H", "F", shard="cols", transposed=True),
        copy(_LAYER + "mlp.linear_fc2.bias", _HF + "mlp.c_proj.bias", "H", init="zeros"),
        *decoder.norm("decoder.final_layernorm", "transformer.ln_f"),
        copy("output_layer.weight", "lm_head.weight", "V", "H", shard="vocab", unless="tie_embeddings"),
        decoder.tied_output("transformer.wte.weight"),
    ),
    ignorable=("attn.bias", "attn.masked_bias"),
)
