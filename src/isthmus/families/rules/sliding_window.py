"""Sliding-window attention in Hugging Face configs: none, in all layers, or by layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from isthmus.errors import DataError, UsageError

Window = Literal[
    "never",
    "always",
    "listed",
    "by_layer",
    "pattern",
    "first_and_pattern",
    "pattern_and_last",
    "by_depth",
    "unread",
    "chunks",
]
"""``listed``: in all layers unless the config lists them; ``by_layer``: Qwen's ``use_sliding_window`` and
``max_window_layers``; ``pattern``: every nth layer has no window; ``first_and_pattern``: nor has the first one, and
``sliding_window_size`` counts the keys before the query's own; ``pattern_and_last``: nor has the last one, whatever the
config lists; ``by_depth``: layers from ``max_window_layers`` on have a window; ``unread``: none has, whatever the
config lists; ``chunks``: attention in chunks of ``attention_chunk_size``."""
Pattern = int | Callable[[Mapping[str, Any], int], Collection[int]]
"""Every nth layer has full attention, or those that a function of the config and the number of layers returns, counted
from 0."""
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def read_window(
    style: Window, hf: Mapping[str, Any], default: int | None, num_layers: int, pattern: Pattern | None = None
) -> tuple[int | None, tuple[int, ...]]:
    """The window size in tokens, including the query's own, and the layers with full attention.

    Returns (None, ()) if all layers have full attention. ``pattern`` selects the layers with full attention, unless
    the config has ``layer_types``.
    """
    if style == "unread":
        return None, ()
    has_none = style == "never" or (style == "by_layer" and not hf.get("use_sliding_window", False))
    size, other = ("attention_chunk_size", _CHUNKED) if style == "chunks" else ("sliding_window", _SLIDING)
    window = None if has_none else _positive(hf, size, default)
    if style == "first_and_pattern" and (before := _positive(hf, "sliding_window_size", None)) is not None:
        window = before + 1
    if style == "always":
        return window, ()
    kinds = hf.get("layer_types")
    if kinds is None:
        kinds = _default_kinds(style, hf, window, num_layers, pattern, other)
    if not isinstance(kinds, Sequence) or len(kinds) != num_layers:
        raise DataError(f"config.json: layer_types must list the kind of each of {num_layers} layers, got {kinds!r}.")
    if unknown := sorted({str(kind) for kind in kinds} - {_FULL, other}):
        raise UsageError(f"layer_types: {', '.join(unknown)} is not supported; {_FULL} and {other} are.")
    if style == "pattern_and_last":
        kinds = [*kinds[:-1], _FULL]
    if other not in kinds:
        return None, ()
    if window is None:
        raise UsageError(
            f"layer_types: {list(kinds).count(other)} of {num_layers} layers have {other}, but {size} is not set. Set "
            f"it, or make them {_FULL}."
        )
    return window, tuple(layer for layer, kind in enumerate(kinds) if kind == _FULL)


def _default_kinds(
    style: Window, hf: Mapping[str, Any], window: int | None, num_layers: int, pattern: Pattern | None, other: str
) -> list[str]:
    if callable(pattern):
        full_layers = pattern(hf, num_layers)
        return [_FULL if layer in full_layers else other for layer in range(num_layers)]
    if style in ("pattern", "first_and_pattern", "pattern_and_last"):
        period = _positive(hf, "sliding_window_pattern", pattern) or pattern or 1
        kinds = [_SLIDING if (layer + 1) % period else _FULL for layer in range(num_layers)]
        return [_FULL, *kinds[1:]] if style == "first_and_pattern" else kinds
    if style in ("listed", "chunks"):
        return [_FULL if window is None else other] * num_layers
    full = hf.get("max_window_layers", pattern or 28) if window is not None else num_layers
    if not isinstance(full, int):
        raise DataError(f"config.json: max_window_layers must be an integer, got {full!r}.")
    full = max(0, min(full, num_layers))
    return [_FULL] * full + [_SLIDING] * (num_layers - full)


def _positive(hf: Mapping[str, Any], key: str, default: int | None) -> int | None:
    value = hf.get(key, default)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise DataError(f"config.json: {key} must be a positive integer or null, got {value!r}.")
    return value


def write_window(style: Window, window: int | None, full: tuple[int, ...], num_layers: int) -> dict[str, Any]:
    if style in ("never", "unread"):
        return {}
    if style == "always":
        return {"sliding_window": window}
    if style == "chunks":
        kinds = [_FULL if window is None or layer in full else _CHUNKED for layer in range(num_layers)]
        return {"layer_types": kinds} if window is None else {"attention_chunk_size": window, "layer_types": kinds}
    slides = [window is not None and layer not in full for layer in range(num_layers)]
    keys = {"sliding_window": window, "layer_types": [_SLIDING if slide else _FULL for slide in slides]}
    if style == "first_and_pattern" and window is not None:
        keys["sliding_window_size"] = window - 1
    if style == "by_layer":
        keys |= {"use_sliding_window": window is not None, "max_window_layers": [*slides, True].index(True)}
    return keys
