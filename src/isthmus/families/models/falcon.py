"""Falcon 7B, 40B and 180B: parallel attention and MLP after one LayerNorm or two, fused query, key and value."""

from collections.abc import Mapping
from typing import Any

from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.blocks.layer import Form
from isthmus.families.family import Derived, Family, Fixed, Key, without
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, in_layer, layer_norm, number
from isthmus.families.rules.rule import renamed, where

_NEW, _PARALLEL, _NORMS = "new_decoder_architecture", "parallel_attn", "num_ln_in_parallel_attn"
_QKV, _HF_QKV = "self_attention.linear_qkv.", "self_attention.query_key_value."
_ATTENTION = (
    # As in Megatron-Core, the rows of query, key and value are grouped by key head.
    in_layer(_QKV + "weight", _HF_QKV + "weight", "W", "H", shard="heads"),
    in_layer(_QKV + "bias", _HF_QKV + "bias", "W", shard="heads", init="zeros", when="qkv_bias"),
    decoder.PROJECTION,
    decoder.PROJECTION_BIAS,
)


def _flag(hf: Mapping[str, Any], name: str, default: bool) -> bool:
    return bool(Key(name, kind=bool, default=default, null=lambda _hf: default).read(hf))


def _form(hf: Mapping[str, Any]) -> Form:
    new, norms = _flag(hf, _NEW, False), hf.get(_NORMS)
    if not _flag(hf, _PARALLEL, True) and not new:
        return "pre"
    form: Form = "parallel_two_norms" if new and norms in (None, 2) else "parallel"
    if norms not in (None, 2 if form == "parallel_two_norms" else 1) or not _flag(hf, _PARALLEL, True):
        raise UsageError(f"config.json: {_NORMS}={norms} is not supported with these settings; leave it out.")
    return form


def _write_form(form: Form, arch: Architecture) -> dict[str, Any]:
    new = form == "parallel_two_norms" or arch.attention.num_query_groups not in (1, arch.attention.num_attention_heads)
    return {
        _NEW: new,
        _PARALLEL: form != "pre",
        _NORMS: {"parallel_two_norms": 2, "parallel": 1}.get(form) if new else None,
    }


def _groups(hf: Mapping[str, Any]) -> int:
    heads = Key("num_attention_heads").read(hf)
    groups = Key("num_kv_heads", default=None, null=lambda _hf: heads).read(hf)
    if _flag(hf, _NEW, False):
        return int(groups)
    return 1 if _flag(hf, "multi_query", True) else int(heads)


FAMILY = Family(
    name="falcon",
    hf_architecture="FalconForCausalLM",
    keys=without(decoder.KEYS, "kv_channels", "num_query_groups")
    | {
        "ffn_hidden_size": Key("ffn_hidden_size", default=None, null=lambda hf: 4 * hf["hidden_size"]),
        "max_position_embeddings": Key("max_position_embeddings", default=2048),
        "norm_epsilon": number("layer_norm_epsilon", 1e-5),
        "activation": decoder.activation("activation", default="gelu"),
        "qkv_bias": flag("bias"),
        "proj_bias": flag("bias"),
        "mlp_bias": flag("bias"),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
    },
    derived={
        "kv_channels": decoder.HEAD_DIM,
        "num_query_groups": Derived(
            _groups, lambda groups, _arch: {"num_kv_heads": groups, "multi_query": groups == 1}
        ),
        "form": Derived(_form, _write_form),
    },
    fixed=decoder.PLAIN_FIXED
    | {
        "alibi": Fixed((False,), "ALiBi positions are not supported"),
        "hidden_dropout": Fixed((0.0,), "one mask for the sum of attention and MLP is not supported", training=True),
        "attention_dropout": Fixed((0.0,), "dropout of attention alone is not supported", training=True),
    },
    dropout={},
    traits={"normalization": "LayerNorm", "gated": False},
    rules=renamed(
        (
            *decoder.EMBEDDING,
            *where("form=pre|parallel", *decoder.INPUT_NORM),
            *where("form=parallel_two_norms", *layer_norm("input_layernorm", "ln_attn")),
            *_ATTENTION,
            *where("form=pre", *decoder.MLP_NORM),
            *where("form=parallel_two_norms", *layer_norm("pre_mlp_layernorm", "ln_mlp")),
            *decoder.MLP,
            *decoder.HEAD,
        ),
        {
            "model.embed_tokens": "transformer.word_embeddings",
            "model.layers": "transformer.h",
            "self_attn.o_proj": "self_attention.dense",
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
            "model.norm": "transformer.ln_f",
        },
    ),
)
