"""Granite with attention sinks, sliding windows, by default in three of four layers, and layers without rotation."""

from collections.abc import Mapping
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Derived, Family, Key
from isthmus.families.models import granite
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, in_layer, number
from isthmus.families.rules.rope_config import read_rotary


def _unrotated(hf: Mapping[str, Any]) -> tuple[int, ...]:
    bases, layers = hf.get("layer_rope_theta"), Key("num_hidden_layers").read(hf)
    if bases is None:
        return ()
    if not isinstance(bases, list) or len(bases) != layers:
        raise DataError(f"config.json: layer_rope_theta must list all {layers} layers, got {bases!r:.80}.")
    base = read_rotary(hf, {}, {}, 2, 2)["rotary_base"]
    if others := {*bases} - {0, base}:
        raise UsageError(
            f"config.json: layer_rope_theta={sorted(others)[0]} is not supported; layers have rope_theta={base:g} or 0."
        )
    return tuple(layer for layer, theta in enumerate(bases) if not theta)


def _bases(unrotated: tuple[int, ...], arch: Architecture) -> dict[str, Any]:
    return {
        "layer_rope_theta": [0 if layer in unrotated else arch.rotary.rotary_base for layer in range(arch.num_layers)]
    }


SINKS = in_layer("self_attention.core_attention.softmax_offset", "self_attn.sinks", "N", shard="rows")

FAMILY = Family(
    name="granite_swa",
    hf_architecture="GraniteSWAForCausalLM",
    keys=dict(granite.FAMILY.keys)
    | {
        "num_query_groups": decoder.kv_heads(default=4),
        "max_position_embeddings": Key("max_position_embeddings", default=8192),
        "norm_epsilon": number("rms_norm_eps", 1e-5),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
    },
    derived={"unrotated_layers": Derived(_unrotated, _bases)},
    fixed=decoder.FIXED,
    traits={"attention_sinks": True},
    sliding_window="pattern",
    sliding_window_default=128,
    sliding_window_pattern=lambda _hf, layers: range(0, layers, 4),
    rules=(*decoder.RULES, SINKS),
)
