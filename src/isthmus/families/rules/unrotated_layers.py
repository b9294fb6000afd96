"""Layers without rotary embedding in Hugging Face configs: listed, by default every nth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.errors import DataError


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
