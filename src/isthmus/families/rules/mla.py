"""What families with multi-head latent attention share; see :class:`isthmus.families.architecture.Mla`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Derived, Fixed, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.rule import copy

_ATTENTION = "decoder.layers.{layer}.self_attention."
_HF_ATTENTION = "model.layers.{layer}.self_attn."

ATTENTION = (
    copy(
        _ATTENTION + "linear_q_proj.weight",
        _HF_ATTENTION + "q_proj.weight",
        "N*Qh",
        "H",
        shard="rows",
        unless="mla.q_lora_rank",
    ),
    copy(
        _ATTENTION + "linear_q_down_proj.weight", _HF_ATTENTION + "q_a_proj.weight", "Rq", "H", when="mla.q_lora_rank"
    ),
    copy(
        _ATTENTION + "q_layernorm.weight",
        _HF_ATTENTION + "q_a_layernorm.weight",
        "Rq",
        init="ones",
        when="mla.q_lora_rank",
    ),
    copy(
        _ATTENTION + "linear_q_up_proj.weight",
        _HF_ATTENTION + "q_b_proj.weight",
        "N*Qh",
        "Rq",
        shard="rows",
        when="mla.q_lora_rank",
    ),
    copy(_ATTENTION + "linear_kv_down_proj.weight", _HF_ATTENTION + "kv_a_proj_with_mqa.weight", "Kd", "H"),
    copy(_ATTENTION + "kv_layernorm.weight", _HF_ATTENTION + "kv_a_layernorm.weight", "Rk", init="ones"),
    copy(_ATTENTION + "linear_kv_up_proj.weight", _HF_ATTENTION + "kv_b_proj.weight", "N*Kv", "Rk", shard="rows"),
    copy(_ATTENTION + "linear_proj.weight", _HF_ATTENTION + "o_proj.weight", "H", "N*Vh", shard="cols"),
)

KEYS = {name: key for name, key in decoder.KEYS.items() if name not in ("num_query_groups", "kv_channels")} | {
    "mla.q_lora_rank": Key("q_lora_rank", default=1536, optional=True),
    "mla.kv_lora_rank": Key("kv_lora_rank", default=512),
    "mla.qk_nope_head_dim": Key("qk_nope_head_dim", default=128),
    "mla.qk_rope_head_dim": Key("qk_rope_head_dim", default=64),
    "mla.v_head_dim": Key("v_head_dim", default=128),
}

FIXED = decoder.FIXED | {
    "attention_bias": Fixed((False,), "the projections of latent attention are built without biases"),
    "pretraining_tp": Fixed((1,), "it cuts the projections into several products"),
    "moe_layer_freq": Fixed((1,), "every layer behind the first dense ones has experts"),
    "ep_size": Fixed((1,), "how experts are spread is not a model's to say"),
}


def _heads(hf: Mapping[str, Any]) -> int:
    """Key/value heads: as many as there are of queries."""
    heads: int = hf["num_attention_heads"]
    said = hf.get("num_key_value_heads")
    if said not in (None, heads):
        raise UsageError(f"num_key_value_heads={said}: with latent attention there are as many as num_attention_heads.")
    return heads


def _width(hf: Mapping[str, Any]) -> int:
    """Of a head's queries: with the rotated channels, which are all that ``head_dim`` counts."""
    rotated = KEYS["mla.qk_rope_head_dim"].read(hf)
    if hf.get("head_dim") not in (None, rotated):
        raise DataError(f"config.json: head_dim={hf['head_dim']} is not qk_rope_head_dim={rotated}. Leave it out.")
    plain: int = KEYS["mla.qk_nope_head_dim"].read(hf)
    return plain + int(rotated)


def _nothing(_value: Any, _arch: Architecture) -> dict[str, Any]:
    return {}


DERIVED = {
    "num_query_groups": Derived(read=_heads, write=lambda heads, arch: {"num_key_value_heads": heads}),
    "kv_channels": Derived(read=_width, write=_nothing),
}
