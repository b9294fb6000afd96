"""Rotary settings of ``model.config`` laid over those of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CONTEXT = "original_max_position_embeddings"
_KEPT = ("rope_theta", "partial_rotary_factor")
"""Settings in ``rope_parameters`` that older configs have outside, and that do not belong to a kind of scaling."""
_LAYER = {"rope_theta": "full_attention", "rope_local_base_freq": "sliding_attention"}


def overlay_rotary(config: Mapping[str, Any], keys: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The keys of ``config`` that change with ``keys``, consistent in the spelling of transformers 5 and the older one.

    Another kind of scaling replaces the settings of the earlier kind; without ``original_max_position_embeddings`` it
    scales from the context length of ``config``. ``names``: the family's names of settings, if they differ.
    """
    outside = {plain: names.get(plain, plain) for plain in _KEPT}
    sections = [name for name in ("rope_scaling", "rope_parameters") if name in keys]
    outer_values = {plain: keys[key] for plain, name in outside.items() for key in (plain, name) if key in keys}
    nested = config.get("rope_parameters") or {}
    if "full_attention" in nested or any("full_attention" in (keys.get(name) or {}) for name in sections):
        return _by_layer(nested, keys, config.get("max_position_embeddings"))
    if not sections and not outer_values:
        return {}
    before = {**nested, **(config.get("rope_scaling") or {})}
    before |= {plain: config[name] for plain, name in outside.items() if plain not in before and name in config}
    for name in sections:
        before = _scaled(before, keys[name], config.get("max_position_embeddings"))
    after = before | outer_values
    scaling = {key: value for key, value in after.items() if key not in _KEPT}
    changed = {name: after[plain] for plain, name in outside.items() if plain in after}
    if "rope_scaling" in sections or config.get("rope_scaling"):
        changed["rope_scaling"] = scaling if scaling.keys() - {"rope_type"} else None
    if "rope_parameters" in sections or nested:
        changed["rope_parameters"] = {"rope_type": "default", **after}
    return changed


def _scaled(before: Mapping[str, Any], settings: Mapping[str, Any] | None, context: int | None) -> dict[str, Any]:
    settings = {"rope_type": "default"} if settings is None else dict(settings)
    if "type" in settings:
        settings["rope_type"] = settings.pop("type")
    earlier = before.get("rope_type", before.get("type", "default"))
    if settings.get("rope_type", earlier) == earlier:
        return {**before, **settings}
    kept_settings = {key: before[key] for key in _KEPT if key in before}
    scales = {_CONTEXT: context} if settings["rope_type"] in ("yarn", "llama3") and context is not None else {}
    return {**kept_settings, **scales, **settings}


def _by_layer(nested: Mapping[str, Any], keys: Mapping[str, Any], context: int | None) -> dict[str, Any]:
    """Settings of a model whose windows have another base: ``rope_parameters`` with the older keys, too."""
    merged = {kind: dict(nested.get(kind) or {}) for kind in _LAYER.values()}
    for kind, settings in (keys.get("rope_parameters") or {}).items():
        # A setting that is not one of a layer kind is refused by the reader.
        merged[kind] = {**merged.get(kind, {}), **settings} if isinstance(settings, Mapping) else settings
    if "rope_scaling" in keys:  # of the layers without a window
        merged["full_attention"] = _scaled(merged["full_attention"], keys["rope_scaling"], context)
    for name, kind in _LAYER.items():
        if name in keys:
            merged[kind]["rope_theta"] = keys[name]
    return {"rope_parameters": merged, **({"rope_scaling": None} if "rope_scaling" in keys else {})}
