"""Flint: QK norms, attention sinks, rotary embedding only with a window, sigmoid routing without an expert bias."""

from collections.abc import Mapping
from typing import Any

from isthmus.families.family import Family, Key, with_defaults
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import flag, in_layer
from isthmus.families.rules.rule import renamed
from isthmus.families.rules.unrotated import unrotated_full_layers

_WINDOW = 513


def _full_layers(hf: Mapping[str, Any], num_layers: int) -> set[int]:
    return {0, 1, num_layers - 1, *range(1, num_layers, 4)}


FAMILY = Family(
    name="flint",
    hf_architecture="FlintForCausalLM",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=4, max_position_embeddings=262144)
    | decoder.ATTENTION_BIAS
    | {
        "kv_channels": Key("head_dim", default=128),
        "moe.num_experts": Key("num_experts", default=256),
        "moe.top_k": Key("num_experts_per_tok", default=6),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=512),
        "moe.shared_ffn_hidden_size": Key("shared_expert_intermediate_size", default=1024),
        "moe.normalize": flag("norm_topk_prob", default=True),
    },
    fixed=decoder.FIXED,
    traits={"qk_norm": True, "attention_sinks": True, "moe.score": "sigmoid"},
    derived={
        "moe.dense_layers": expert_tensors.sparse_step(dense=(0, 1)),
        "unrotated_layers": unrotated_full_layers(window=_WINDOW, pattern=_full_layers, null_rotates=False),
    },
    sliding_window="pattern",
    sliding_window_default=_WINDOW,
    sliding_window_pattern=_full_layers,
    rules=decoder.pre_norm_rules(
        attention=(
            *decoder.ATTENTION,
            in_layer("self_attention.core_attention.softmax_offset", "self_attn.softmax_offset", "N", shard="rows"),
        ),
        mlp=renamed(expert_tensors.DENSE_AND_MOE, {"shared_experts": "shared_expert"}),
    ),
)
