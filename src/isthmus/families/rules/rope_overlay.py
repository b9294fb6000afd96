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
    given = [name for name in ("rope_scaling", "rope_parameters") if name in keys]
    own = {plain: keys[key] for plain, name in outside.items() for key in (plain, name) if key in keys}
    nested = config.get("rope_parameters") or {}
    if "full_attention" in nested or any("full_attention" in (keys.get(name) or {}) for name in given):
        return _by_layer(nested, keys, config.get("max_position_embeddings"))
    if not given and not own:
        return {}
    before = {**nested, **(config.get("rope_scaling") or {})}
    before |= {plain: config[name] for plain, name in outside.items() if plain not in before and name in config}
    for name in given:
        before = _scaled(before, keys[name], config.get("max_position_embeddings"))
    after = before | own
    scaling = {key: value for key, value in after.items() if key not in _KEPT}
    changed = {name: after[plain] for plain, name in outside.items() if plain in after}
    if "rope_scaling" in given or config.get("rope_scaling"):
        changed["rope_scaling"] = scaling if scaling.keys() - {"rope_type"} else None
    if "rope_parameters" in given or nested:
        changed["rope_parameters"] = {"rope_type": "default", **after}
    return changed


def _scaled(before: Mapping[str, Any], given: Mapping[str, Any] | None, context: int | None) -> dict[str, Any]:
    given = {"rope_type": "default"} if given is None else dict(given)
    if "type" in given:
        given["rope_type"] = given.pop("type")
    earlier = before.get("rope_type", before.get("type", "default"))
    if given.get("rope_type", earlier) == earlier:
        return {**before, **given}
    kept = {key: before[key] for key in _KEPT if key in before}
    scales = {_CONTEXT: context} if given["rope_type"] in ("yarn", "llama3") and context is not None else {}
    return {**kept, **scales, **given}


def _by_layer(nested: Mapping[str, Any], keys: Mapping[str, Any], context: int | None) -> dict[str, Any]:
    """Of a model whose sliding-window layers have another base: ``rope_parameters`` with the older keys, too."""
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
