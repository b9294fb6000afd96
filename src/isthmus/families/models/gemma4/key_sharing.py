"""Layers that attend to the keys and values of another layer: their number in configs, and rules of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isthmus.errors import DataError
from isthmus.families.config_keys import Derived, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import in_layer
from isthmus.families.rules.rule import Rule, by_window, in_layers, qk
from isthmus.families.rules.sliding_window import Pattern, Window, read_window

_NUMBER = Key("num_kv_shared_layers", default=0, least=0)


def sharing_layers(window: Window, pattern: Pattern) -> Derived:
    """The number of the last layers that share keys; before them are layers with each reach that they have."""

    def read(hf: Mapping[str, Any]) -> int:
        number: int = _NUMBER.read(hf)
        if number:
            layers = Key("num_hidden_layers").read(hf)
            size, full = read_window(window, hf, 1, layers, pattern)
            reach = [size is None or layer in full for layer in range(layers)]
            if number >= layers or {*reach[: layers - number]} != {*reach}:
                raise DataError(
                    f"config.json: {_NUMBER.hf}={number} of {layers} layers; those before must include layers with and "
                    "without a window like the others."
                )
        return number

    return Derived(read, lambda number, _arch: {_NUMBER.hf: number})


def _also_sharing(*rules: Rule) -> tuple[Rule, ...]:
    """Rules of layers with full attention or a window, for layers that share keys, too."""
    return tuple(replace(rule, layers=f"{rule.layers}|{rule.layers}_queries") for rule in rules)


def _only_sharing(*rules: Rule) -> tuple[Rule, ...]:
    """Rules of layers with full attention or a window, for those of them that share keys."""
    return tuple(replace(rule, layers=f"{rule.layers}_queries") for rule in rules)


_QKV, *_ = decoder.ATTENTION
_Q_NORM, _K_NORM = decoder.QK_NORMS[:3], decoder.QK_NORMS[3:]
_QK = qk(_QKV.canonical, *(part.name for part in _QKV.parts[:2]), "H", when="values_are_keys")
_QUERIES = in_layer("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", "N*D", "H", shard="rows")
ATTENTION = (
    *in_layers("full", replace(_QKV, unless="values_are_keys"), _QK),
    *by_window(_QKV)[1:],
    *_only_sharing(*by_window(_QUERIES)),
    *_also_sharing(*by_window(decoder.PROJECTION, *_Q_NORM)),
    *by_window(*_K_NORM),
)
"""Rules of layers with full attention, whose values may be keys, with a window, and that share keys; without biases."""
UNUSED = _only_sharing(
    *by_window(*(in_layer("", f"self_attn.{name}.weight", "1") for name in ("k_proj", "v_proj", "k_norm")))
)
"""Names of published files."""
