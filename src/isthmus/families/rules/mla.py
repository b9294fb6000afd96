"""Rules and config keys shared by families with multi-head latent attention (MLA, arXiv 2405.04434)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.errors import UsageError
from isthmus.families.config_keys import Derived, Fixed, Key, without
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import in_layer
from isthmus.families.rules.rule import Rule, where


def _projection(canonical: str, hf: str, *symbols: str, **fields: Any) -> Rule:
    return in_layer(f"self_attention.{canonical}.weight", f"self_attn.{hf}.weight", *symbols, **fields)


ATTENTION = (
    _projection("linear_q_proj", "q_proj", "N*Qh", "H", shard="rows", unless="mla.q_lora_rank"),
    *where(
        "mla.q_lora_rank",
        _projection("linear_q_down_proj", "q_a_proj", "Rq", "H"),
        _projection("q_layernorm", "q_a_layernorm", "Rq", init="ones"),
        _projection("linear_q_up_proj", "q_b_proj", "N*Qh", "Rq", shard="rows"),
    ),
    _projection("linear_kv_down_proj", "kv_a_proj_with_mqa", "Kd", "H"),
    _projection("kv_layernorm", "kv_a_layernorm", "Rk", init="ones"),
    _projection("linear_kv_up_proj", "kv_b_proj", "N*Kv", "Rk", shard="rows"),
    _projection("linear_proj", "o_proj", "H", "N*Vh", shard="cols"),
)

HEAD_GATE = _projection("linear_gate", "g_proj", "N", "H", shard="rows")

KEYS = without(decoder.KEYS, "num_query_groups", "kv_channels") | {
    "mla.q_lora_rank": Key("q_lora_rank", default=1536, optional=True),
    "mla.kv_lora_rank": Key("kv_lora_rank", default=512),
    "mla.qk_nope_head_dim": Key("qk_nope_head_dim", default=128),
    "mla.qk_rope_head_dim": Key("qk_rope_head_dim", default=64),
    "mla.v_head_dim": Key("v_head_dim", default=128),
}

FIXED = decoder.FIXED | {
    "attention_bias": Fixed((False,), "biases of latent attention are not supported"),
    "pretraining_tp": Fixed((1,), "split projections are not supported"),
    "moe_layer_freq": Fixed((1,), "every layer after the first dense ones has experts"),
    "ep_size": Fixed((1,), "expert parallelism is set by parallel.ep"),
}


def _heads(hf: Mapping[str, Any]) -> int:
    heads: int = hf["num_attention_heads"]
    groups = hf.get("num_key_value_heads")
    if groups not in (None, heads):
        raise UsageError(f"num_key_value_heads={groups} must equal num_attention_heads={heads} with latent attention.")
    return heads


DERIVED = {"num_query_groups": Derived(read=_heads, write=lambda heads, arch: {"num_key_value_heads": heads})}
