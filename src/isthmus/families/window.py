"""Sliding-window attention as Hugging Face configs say it: not at all, for all layers, or layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from isthmus.errors import UsageError

Window = Literal["never", "always", "by_layer"]


def read_window(style: Window, hf: Mapping[str, Any], default: int | None, num_layers: int) -> int | None:
    """Keys that a query sees, itself included, in every layer; None where it sees all before it.

    Raises:
        UsageError: some layers slide and others do not.
    """
    window = hf.get("sliding_window", default)
    if style == "never" or (style == "by_layer" and not hf.get("use_sliding_window", False)):
        window = None
    if style == "by_layer":
        layers = hf.get("layer_types")
        if layers is None:
            full = num_layers if window is None else min(hf.get("max_window_layers", 28), num_layers)
            layers = ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
        kinds = set(layers)
        if kinds - {"full_attention"} and (kinds != {"sliding_attention"} or window is None):
            raise UsageError(
                f"use_sliding_window: {layers.count('sliding_attention')} of {num_layers} layers slide; "
                "only models whose layers are all alike are supported. Set use_sliding_window to false if "
                f"seq_length stays within {window}."
            )
        window = window if kinds == {"sliding_attention"} else None
    return int(window) if window is not None else None


def write_window(style: Window, window: int | None, num_layers: int) -> dict[str, Any]:
    """The keys that say ``window`` in this style."""
    if style == "never":
        return {}
    if style == "always":
        return {"sliding_window": window}
    kind = "full_attention" if window is None else "sliding_attention"
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": num_layers if window is None else 0,
        "layer_types": [kind] * num_layers,
    }
