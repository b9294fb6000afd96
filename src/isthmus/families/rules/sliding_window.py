"""Sliding-window attention as Hugging Face configs say it: not at all, for all layers, or layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from isthmus.errors import DataError, UsageError

Window = Literal["never", "always", "by_layer", "pattern"]
"""``by_layer`` is Qwen's way, a switch and a number of layers without window; ``pattern`` one in so many without."""
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_window(
    style: Window, hf: Mapping[str, Any], default: int | None, num_layers: int, every: int | None = None
) -> tuple[int | None, tuple[int, ...]]:
    """Keys that a query sees, itself included, and the layers in which it sees all before it; (None, ()) if in all.

    Args:
        style: how the family says it.
        hf: the config.
        default: ``sliding_window`` of a config that does not say it.
        num_layers: of the model.
        every: of so many layers one has no window, where the config lists none (``pattern``).

    Raises:
        UsageError: a layer is of a kind that is not built, or slides through a window of no size.
        DataError: the list of kinds is not one of all layers.
    """
    window = hf.get("sliding_window", default)
    if style == "always":
        return (None, ()) if window is None else (int(window), ())
    if style == "never" or (style == "by_layer" and not hf.get("use_sliding_window", False)):
        window = None
    kinds = hf.get("layer_types")
    if kinds is None:
        kinds = _usual_kinds(style, hf, window, num_layers, every)
    if not isinstance(kinds, Sequence) or len(kinds) != num_layers:
        raise DataError(f"config.json: layer_types must list the kind of each of {num_layers} layers, got {kinds!r}.")
    if unknown := sorted({str(kind) for kind in kinds} - {_FULL, _SLIDING}):
        raise UsageError(f"layer_types: {', '.join(unknown)} is not built; known are {_FULL} and {_SLIDING}.")
    if _SLIDING not in kinds:
        return None, ()
    if window is None:
        raise UsageError(
            f"layer_types: {list(kinds).count(_SLIDING)} of {num_layers} layers slide, but no window is given. "
            "Set sliding_window, or make them full_attention."
        )
    return int(window), tuple(layer for layer, kind in enumerate(kinds) if kind == _FULL)


def _usual_kinds(
    style: Window, hf: Mapping[str, Any], window: int | None, num_layers: int, every: int | None
) -> list[str]:
    if style == "pattern":
        period = hf.get("sliding_window_pattern") or every or 1
        return [_SLIDING if (layer + 1) % period else _FULL for layer in range(num_layers)]
    full = num_layers if window is None else min(hf.get("max_window_layers", 28), num_layers)
    return [_FULL] * full + [_SLIDING] * (num_layers - full)


def write_window(style: Window, window: int | None, full: tuple[int, ...], num_layers: int) -> dict[str, Any]:
    """The keys that say ``window``, and the layers that are ``full``, in this style."""
    if style == "never":
        return {}
    if style == "always":
        return {"sliding_window": window}
    slides = [window is not None and layer not in full for layer in range(num_layers)]
    said = {"sliding_window": window, "layer_types": [_SLIDING if slide else _FULL for slide in slides]}
    if style == "by_layer":
        said |= {"use_sliding_window": window is not None, "max_window_layers": [*slides, True].index(True)}
    return said
