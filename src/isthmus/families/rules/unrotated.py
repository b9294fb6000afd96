"""Layers without rotary embedding: listed by the config, by default every nth, or those with full attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.config_keys import Derived, Key
from isthmus.families.rules.sliding_window import Pattern, read_window


def read_unrotated(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """From ``no_rope_layers``, in which rotated layers are 1; without it or empty, from ``no_rope_layer_interval``."""
    rotated, layers = hf.get("no_rope_layers"), range(hf["num_hidden_layers"])
    if not rotated and rotated in (None, []):
        interval = hf.get("no_rope_layer_interval", 4)
        if not isinstance(interval, int) or interval < 1:
            raise DataError(f"config.json: no_rope_layer_interval must be a positive integer, got {interval!r}.")
        rotated = [(layer + 1) % interval for layer in layers]
    if not isinstance(rotated, list) or len(rotated) < len(layers):
        raise DataError(f"config.json: no_rope_layers must list all {len(layers)} layers, got {rotated!r}.")
    return tuple(layer for layer in layers if not rotated[layer])


def write_unrotated(unrotated: tuple[int, ...], num_layers: int) -> dict[str, Any]:
    return {"no_rope_layers": [int(layer not in unrotated) for layer in range(num_layers)]}


def unrotated_full_layers(*, window: int | None, pattern: Pattern, null_rotates: bool) -> Derived:
    """Only layers with a sliding window are rotated; with ``null_rotates`` all, if ``sliding_window`` is null.

    ``window`` and ``pattern`` are the family's ``sliding_window_default`` and ``sliding_window_pattern``.
    """

    def read(hf: Mapping[str, Any]) -> tuple[int, ...]:
        if null_rotates and hf.get("sliding_window", window) is None:
            return ()
        layers = Key("num_hidden_layers").read(hf)
        size, full = read_window("pattern", hf, window, layers, pattern)
        return full if size is not None else tuple(range(layers))

    def write(unrotated: tuple[int, ...], arch: Architecture) -> Mapping[str, Any]:
        implied = () if null_rotates else tuple(range(arch.num_layers))
        if unrotated != (implied if arch.windows.sliding_window is None else arch.windows.full_attention_layers):
            raise UsageError(
                f"{arch.family}: config.json cannot express layers without rotary embedding other than those with full "
                f"attention, got {list(unrotated)}."
            )
        return {}

    return Derived(read, write)
