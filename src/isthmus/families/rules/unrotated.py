"""Layers without rotary embedding because they have full attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.config_keys import Derived, Key
from isthmus.families.rules.sliding_window import Pattern, read_window


def unrotated_full_layers(*, window: int | None, pattern: Pattern, null_rotates: bool) -> Derived:
    """Only layers with a sliding window are rotated; with ``null_rotates`` all, if ``sliding_window`` is null.

    ``window`` and ``every`` are the family's ``sliding_window_default`` and ``sliding_window_pattern``.
    """

    def read(hf: Mapping[str, Any]) -> tuple[int, ...]:
        if null_rotates and hf.get("sliding_window", window) is None:
            return ()
        layers = Key("num_hidden_layers").read(hf)
        size, full = read_window("pattern", hf, window, layers, pattern)
        return full if size is not None else tuple(range(layers))

    def write(unrotated: tuple[int, ...], arch: Architecture) -> Mapping[str, Any]:
        implied = () if null_rotates else tuple(range(arch.num_layers))
        if unrotated != (implied if arch.sliding_window is None else arch.full_attention_layers):
            raise UsageError(
                f"{arch.family}: config.json cannot express layers without rotary embedding other than those with full "
                f"attention, got {list(unrotated)}."
            )
        return {}

    return Derived(read, write)
