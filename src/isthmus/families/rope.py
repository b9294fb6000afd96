"""Rotary settings of a Hugging Face config: the ``rope_parameters`` of transformers 5 and the keys that came before.

An export carries both spellings: older readers know only ``rope_theta`` and ``rope_scaling`` and would take a theta of
10000 in silence, newer ones read either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture, RopeScaling

_DEFAULT_THETA = 10000.0
_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_KNOWN = {"rope_type", "type", "rope_theta", "factor", *_LLAMA3}


def read_rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return ``(rotary_base, scaling)``.

    Raises:
        UsageError: a kind of scaling other than llama3 and linear, or part of a head rotated.
        DataError: theta, or a number that its kind of scaling needs, is missing or not positive.
    """
    said = _said(hf)
    theta = _first(said.get("rope_theta"), hf.get("rope_theta"), _DEFAULT_THETA)
    if not isinstance(theta, int | float) or theta <= 0:
        raise DataError(f"config.json: rope_theta must be a positive number, got {theta!r}.")
    partial = _first(said.pop("partial_rotary_factor", None), hf.get("partial_rotary_factor"), 1.0)
    if partial != 1.0:
        raise UsageError(f"partial_rotary_factor={partial}: only heads that are rotated whole are built.")
    kind = said.get("rope_type", said.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise UsageError(f"rope type '{kind}' is not supported; known are default, linear and llama3.")
    if kind == "default":
        said.pop("factor", None)
    if unknown := sorted(said.keys() - _KNOWN):
        raise UsageError(f"rope settings {', '.join(unknown)} are not known for rope type '{kind}'.")
    if kind == "default":
        return float(theta), None
    if kind == "llama3":
        context = _first(hf.get(_LLAMA3[2]), said.get(_LLAMA3[2]), hf.get("max_position_embeddings"))
        said[_LLAMA3[2]] = context
    needed = ("factor", *_LLAMA3) if kind == "llama3" else ("factor",)
    for key in needed:
        if not isinstance(said.get(key), int | float) or said[key] <= 0:
            raise DataError(f"config.json: rope type '{kind}' needs a positive {key}, got {said.get(key)!r}.")
    numbers: dict[str, Any] = {key: (int if key == _LLAMA3[2] else float)(said[key]) for key in needed}
    return float(theta), RopeScaling(kind=cast(Literal["llama3", "linear"], kind), **numbers)


def write_rope(arch: Architecture, base: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings of the architecture's rotary settings; words of ``base`` with the same meaning are kept."""
    scaling: dict[str, Any] | None = None
    if arch.rope_scaling is not None:
        same = _said(base) if read_rope(base) == (arch.rotary_base, arch.rope_scaling) else {}
        same.pop("rope_theta", None)
        keys = ("factor", *_LLAMA3) if arch.rope_scaling.kind == "llama3" else ("factor",)
        scaling = {**same, "rope_type": arch.rope_scaling.kind}
        scaling |= {key: getattr(arch.rope_scaling, key) for key in keys}
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": arch.rotary_base}
    return {"rope_parameters": parameters, "rope_theta": arch.rotary_base, "rope_scaling": scaling}


def _said(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings as one flat dict; like transformers, the older key wins where both are given."""
    said = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(said, Mapping):
        raise DataError(f"config.json: rope settings must be an object, got {said!r}.")
    if nested := [key for key, value in said.items() if isinstance(value, Mapping)]:
        raise UsageError(f"rope settings that differ by layer ({', '.join(nested)}) are not supported.")
    return dict(said)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
