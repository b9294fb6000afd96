"""Attention sizes of single layers in a config: ``per_layer_config``, and the older keys of layers without a window."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.config_keys import Derived, Key
from isthmus.families.rules.sliding_window import Pattern, Window, read_window

_OVERRIDES = "per_layer_config"
_SIZES = ("head_dim", "num_key_value_heads")


def full_attention_size(key: Key, older: Callable[[Mapping[str, Any]], int], window: tuple[Window, Pattern]) -> Derived:
    """A size of the attention in layers without a window; ``key`` is that of layers with one.

    ``older`` reads it from a config without ``per_layer_config``; ``window`` are the family's kind of window and
    pattern. Both spellings are written, because classes from before ``per_layer_config`` ignore it.
    """

    def read(hf: Mapping[str, Any]) -> int:
        if _OVERRIDES not in hf:
            return older(hf)
        usual, number = key.read(hf), Key("num_hidden_layers").read(hf)
        overrides = _read_overrides(hf, number)
        size, full = read_window(window[0], hf, 1, number, window[1])
        without = {layer for layer in range(number) if size is None or layer in full}
        sizes = {layer: key.read({**hf, **overrides.get(layer, {})}) for layer in range(number)}
        if any(sizes[layer] != usual for layer in sizes.keys() - without) or len({sizes[at] for at in without}) != 1:
            raise UsageError(
                f"config.json: {_OVERRIDES} must have one {key.hf} for all layers without a window, and none for "
                f"others; got {sizes}."
            )
        return sizes[min(without)]

    return Derived(read, _write)


def full_attention_heads(key: Key) -> Callable[[Mapping[str, Any]], int]:
    """The number of key heads in a config without ``per_layer_config``; ``key`` is that of layers with a window."""
    name = "num_global_key_value_heads"

    def read(hf: Mapping[str, Any]) -> int:
        has_own = hf.get("attention_k_eq_v") and hf.get(name) is not None
        heads: int = (Key(name) if has_own else key).read(hf)
        return heads

    return read


def _read_overrides(hf: Mapping[str, Any], number: int) -> dict[int, Mapping[str, Any]]:
    overrides = hf[_OVERRIDES] or {}
    if not isinstance(overrides, Mapping) or not all(
        str(layer).isdecimal() and int(layer) < number and isinstance(sizes, Mapping)
        for layer, sizes in overrides.items()
    ):
        raise DataError(f"config.json: {_OVERRIDES} must have an object for layers from 0 to {number - 1}.")
    if others := sorted({name for sizes in overrides.values() for name in sizes} - {*_SIZES}):
        raise UsageError(
            f"config.json: {_OVERRIDES} with {', '.join(others)} is not supported; with {' and '.join(_SIZES)} it is."
        )
    return {int(layer): sizes for layer, sizes in overrides.items()}


def _write(_size: int, arch: Architecture) -> dict[str, Any]:
    sizes = dict(zip(_SIZES, (arch.attention.kv_channels, arch.attention.num_query_groups), strict=True))
    full = [layer for layer in range(arch.num_layers) if arch.windows.of(layer) is None]
    older = {
        "global_head_dim": arch.attention.kv_channels,
        "num_global_key_value_heads": arch.attention.num_query_groups,
    }
    return {**older, _OVERRIDES: {str(layer): sizes for layer in full}}
