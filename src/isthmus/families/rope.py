"""Rotary settings of a Hugging Face config: the ``rope_parameters`` of transformers 5 and the keys that came before.

An export carries both spellings: older readers know only ``rope_theta`` and ``rope_scaling`` and would take a theta of
10000 in silence, newer ones read either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture, RopeScaling

_DEFAULT_THETA = 10000.0
_CONTEXT = "original_max_position_embeddings"
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _CONTEXT),
    "yarn": ("factor", _CONTEXT),
}
_OPTIONAL = {"yarn": ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor")}
_TYPES: Mapping[str, Callable[[Any], Any]] = {_CONTEXT: int, "truncate": bool}
_DEFAULTS = {field.name: field.default for field in fields(RopeScaling)}
_KNOWN = {"rope_type", "type", "rope_theta", *_NEEDED["llama3"], *_OPTIONAL["yarn"]}


def read_rope(hf: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> tuple[float, RopeScaling | None]:
    """Return ``(rotary_base, scaling)``; ``defaults`` are the settings of a config that says nothing of them.

    Raises:
        UsageError: a kind of scaling other than those of ``_NEEDED``, or part of a head rotated.
        DataError: theta, or a number that its kind of scaling needs, is missing or not positive.
    """
    defaults = defaults or {}
    said = _said(hf, defaults)
    theta = _first(said.get("rope_theta"), hf.get("rope_theta"), defaults.get("rope_theta"), _DEFAULT_THETA)
    if not isinstance(theta, int | float) or theta <= 0:
        raise DataError(f"config.json: rope_theta must be a positive number, got {theta!r}.")
    partial = _first(said.pop("partial_rotary_factor", None), hf.get("partial_rotary_factor"), 1.0)
    if partial != 1.0:
        raise UsageError(f"partial_rotary_factor={partial}: only heads that are rotated whole are built.")
    kind = said.get("rope_type", said.get("type", "default"))
    if kind not in _NEEDED:
        raise UsageError(f"rope type '{kind}' is not supported; known are {', '.join(_NEEDED)}.")
    if kind == "default":
        said.pop("factor", None)
    if unknown := sorted(said.keys() - _KNOWN):
        raise UsageError(f"rope settings {', '.join(unknown)} are not known for rope type '{kind}'.")
    if kind == "default":
        return float(theta), None
    context = hf.get("max_position_embeddings")
    said[_CONTEXT] = _first(hf.get(_CONTEXT), said.get(_CONTEXT), context)
    if kind == "yarn" and said.get("factor") is None and context and said[_CONTEXT]:
        said["factor"] = context / said[_CONTEXT]
    for key in _NEEDED[kind]:
        if not isinstance(said.get(key), int | float) or said[key] <= 0:
            raise DataError(f"config.json: rope type '{kind}' needs a positive {key}, got {said.get(key)!r}.")
    chosen = [*_NEEDED[kind], *(key for key in _OPTIONAL.get(kind, ()) if said.get(key) is not None)]
    values: dict[str, Any] = {key: _TYPES.get(key, float)(said[key]) for key in chosen}
    return float(theta), RopeScaling(kind=kind, **values)


def write_rope(
    arch: Architecture, base: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Both spellings of the architecture's rotary settings; words of ``base`` with the same meaning are kept."""
    scaling: dict[str, Any] | None = None
    if (found := arch.rope_scaling) is not None:
        same = _said(base, {}) if read_rope(base, defaults) == (arch.rotary_base, found) else {}
        same.pop("rope_theta", None)
        said = [key for key in _OPTIONAL.get(found.kind, ()) if getattr(found, key) != _DEFAULTS[key]]
        scaling = {**same, "rope_type": found.kind}
        scaling |= {key: getattr(found, key) for key in (*_NEEDED[found.kind], *said)}
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": arch.rotary_base}
    return {"rope_parameters": parameters, "rope_theta": arch.rotary_base, "rope_scaling": scaling}


def _said(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings as one flat dict; like transformers, the older key wins where both are given."""
    said = hf.get("rope_scaling") or hf.get("rope_parameters") or defaults.get("rope_parameters") or {}
    if not isinstance(said, Mapping):
        raise DataError(f"config.json: rope settings must be an object, got {said!r}.")
    if nested := [key for key, value in said.items() if isinstance(value, Mapping)]:
        raise UsageError(f"rope settings that differ by layer ({', '.join(nested)}) are not supported.")
    return dict(said)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
