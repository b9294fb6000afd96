"""Settings that older configs list by layer, where newer ones have a setting for each kind of layer (Step 3.5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.config_keys import Derived, Key

_FULL, _SLIDING = "full_attention", "sliding_attention"
_KINDS, _PARAMETERS, _SHARE = "layer_types", "rope_parameters", "partial_rotary_factor"
_HEADS, _WINDOW_HEADS = "num_attention_heads", "num_sliding_attention_heads"
_OVERRIDES, _OTHER, _EXPERTS = "per_layer_config", "attention_other_setting", "moe_layers_enum"
_ROTARY = ("rope_theta", "partial_rotary_factors", "rope_scaling")
_LISTS = (_KINDS, "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", *_ROTARY[:2])
_THETA = 10000.0


def newer_spelling(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A config whose lists have no entries of MTP layers, with rotary settings and heads of each kind of layer.

    Raises:
        DataError: a list has not an entry for each layer.
        UsageError: settings differ among layers of one kind, or in another way than the class supports.
    """
    layers = Key("num_hidden_layers").read(hf)
    mtp = Key("num_nextn_predict_layers", default=0, null=lambda _hf: 0, least=0, aliases=("num_mtp_layers",)).read(hf)
    newer = dict(hf)
    for name in _LISTS:
        if isinstance(values := hf.get(name), list):
            if values and len(values) not in (layers, layers + mtp):
                raise DataError(
                    f"config.json: {name} has {len(values)} entries for {layers} layers and {mtp} MTP layers."
                )
            newer[name] = values[:layers]
    if newer.get(_KINDS) is None:
        newer[_KINDS] = [_FULL] * layers
    if newer.get("mlp_layer_types") is None and hf.get(_EXPERTS) is not None:
        chosen = _numbers(hf[_EXPERTS])
        newer["mlp_layer_types"] = ["sparse" if layer in chosen else "dense" for layer in range(layers)]
    newer[_WINDOW_HEADS] = _window_heads(newer)
    values = newer.get(_PARAMETERS)
    if not isinstance(values, Mapping) or not all(isinstance(values.get(kind), Mapping) for kind in newer[_KINDS]):
        newer[_PARAMETERS] = _rotary(newer)
    return {name: value for name, value in newer.items() if name not in (*_ROTARY, _EXPERTS, _OTHER, _OVERRIDES)}


def _numbers(numbers: Any) -> set[int]:
    items = numbers.split(",") if isinstance(numbers, str) else numbers
    if not isinstance(items, list) or not all(str(item).strip().isdecimal() for item in items if str(item).strip()):
        raise DataError(f"config.json: {_EXPERTS} must be numbers of layers, separated by commas, got {numbers!r:.60}.")
    return {int(item) for item in items if str(item).strip()}


def _window_heads(hf: Mapping[str, Any]) -> int:
    """Query heads of sliding-window layers: of ``per_layer_config``, else of older settings."""
    usual: int = Key(_HEADS, default=64).read(hf)
    if _OVERRIDES in hf:
        overrides, kinds = hf[_OVERRIDES] or {}, hf[_KINDS]
        if not isinstance(overrides, Mapping) or not all(isinstance(sizes, Mapping) for sizes in overrides.values()):
            raise DataError(f"config.json: {_OVERRIDES} must have an object for each layer, got {overrides!r:.60}.")
        heads = [{_HEADS: usual, **overrides.get(str(at), overrides.get(at, {}))} for at in range(len(kinds))]
        windowed = [sizes for sizes, kind in zip(heads, kinds, strict=True) if kind == _SLIDING]
        plain = [sizes for sizes, kind in zip(heads, kinds, strict=True) if kind != _SLIDING]
        if any(sizes != {_HEADS: usual} for sizes in plain) or any(
            sizes != {_HEADS: sizes[_HEADS]} for sizes in windowed
        ):
            raise UsageError(f"config.json: {_OVERRIDES} is supported for {_HEADS} of {_SLIDING} layers only.")
        if len({sizes[_HEADS] for sizes in windowed}) > 1:
            raise UsageError(f"config.json: {_OVERRIDES} must have one {_HEADS} for all {_SLIDING} layers.")
        return Key(_HEADS).read(windowed[0]) if windowed else usual
    if hf.get(_WINDOW_HEADS) is not None or not (other := hf.get(_OTHER)):
        return Key(_WINDOW_HEADS, default=usual).read(hf)
    if not isinstance(other, Mapping):
        raise DataError(f"config.json: {_OTHER} must be an object, got {other!r:.60}.")
    groups, width = hf.get("num_key_value_heads", hf.get("num_attention_groups", 8)), hf.get("head_dim", 128)
    expected = {"attention_type": _SLIDING, "num_attention_groups": groups, "head_dim": width, "true_head_dim": width}
    if differing := [name for name, value in expected.items() if other.get(name, value) != value]:
        raise UsageError(
            f"config.json: {_OTHER} with {differing[0]}={other[differing[0]]!r:.60} is not supported; it must be "
            f"{expected[differing[0]]}, as only {_HEADS} may differ."
        )
    return Key(_HEADS, default=usual).read(other)


def _rotary(hf: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` for each kind of layer; the config's own ones have no such settings."""
    kinds = hf[_KINDS]
    thetas, shares = hf.get("rope_theta", _THETA), hf.get("partial_rotary_factors") or None
    thetas = thetas if isinstance(thetas, list) else [thetas] * len(kinds)
    if shares is not None and not isinstance(shares, list):
        raise DataError(f"config.json: partial_rotary_factors must be a list, got {shares!r:.60}.")
    rotary: dict[str, Any] = {}
    for theta, share, kind in zip(thetas, shares or [None] * len(kinds), kinds, strict=True):
        parameters = {"rope_type": "default", "rope_theta": theta} | ({} if share is None else {_SHARE: share})
        if rotary.setdefault(kind, parameters) != parameters:
            raise UsageError(f"config.json: rotary settings that differ among {kind} layers are not supported.")
    if hf.get("rope_scaling") and _FULL in rotary:
        if not isinstance(hf["rope_scaling"], Mapping):
            raise DataError(f"config.json: rope_scaling must be an object, got {hf['rope_scaling']!r:.60}.")
        rotary[_FULL] = {**rotary[_FULL], **hf["rope_scaling"]}
    return rotary


def _write_heads(heads: int | None, arch: Architecture) -> dict[str, Any]:
    heads = heads or arch.attention.num_attention_heads
    windowed = [layer for layer in range(arch.num_layers) if arch.windows.of(layer) is not None]
    return {_WINDOW_HEADS: heads, _OVERRIDES: {str(layer): {_HEADS: heads} for layer in windowed}}


WINDOW_HEADS = Derived(Key(_WINDOW_HEADS).read, _write_heads)
"""Query heads of sliding-window layers."""


def swiglu_limits(key: str) -> Derived:
    """Limits by layer; null and 0 are none."""

    def read(hf: Mapping[str, Any]) -> tuple[float | None, ...]:
        limits = hf.get(key) or []
        if not isinstance(limits, list) or not all(isinstance(limit, int | float | None) for limit in limits):
            raise DataError(f"config.json: {key} must list numbers, got {limits!r:.60}.")
        if any((limit or 0) < 0 for limit in limits):
            raise DataError(f"config.json: {key} must not be negative, got {limits!r:.60}.")
        return tuple(float(limit) if limit else None for limit in limits) if any(limits) else ()

    return Derived(read, lambda limits, arch: {key: [limit or 0.0 for limit in limits] or None})
