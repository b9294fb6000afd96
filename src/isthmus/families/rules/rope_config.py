"""Rotary settings of a Hugging Face config: the ``rope_parameters`` of transformers 5 and the keys that came before.

An export carries both spellings: older readers know only ``rope_theta`` and ``rope_scaling`` and would take a theta of
10000 in silence, newer ones read either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture, RopeScaling

_DEFAULT_THETA = 10000.0
_CONTEXT = "original_max_position_embeddings"
_SHARE = "partial_rotary_factor"
_LISTS = ("short_factor", "long_factor")
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _CONTEXT),
    "yarn": ("factor", _CONTEXT),
    "longrope": ("factor", _CONTEXT, *_LISTS),
}
_OPTIONAL = {
    "yarn": ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor"),
    "longrope": ("attention_factor",),
}
_TYPES: Mapping[str, Callable[[Any], Any]] = {_CONTEXT: int, "truncate": bool} | dict.fromkeys(_LISTS, tuple)
_ALIASES = {"su": "longrope"}
_DEFAULTS = {field.name: field.default for field in fields(RopeScaling)}
_KNOWN = {"rope_type", "type", "rope_theta", *_NEEDED["llama3"], *_OPTIONAL["yarn"], *_LISTS}
_LAYERED = ("full_attention", "sliding_attention")
_WINDOW_THETA = "rope_local_base_freq"


def read_rotary(
    hf: Mapping[str, Any], defaults: Mapping[str, Any], names: Mapping[str, str], head_width: int
) -> dict[str, Any]:
    """The fields of the Architecture that say how heads are rotated.

    Args:
        hf: the config.
        defaults: settings of a config that says nothing of them. With ``rope_local_base_freq`` among them the layers
            with a window have a base of their own.
        names: what the family calls ``rope_theta`` and ``partial_rotary_factor``, where it does not call them so.
        head_width: channels of a head.

    Raises:
        UsageError: a kind of scaling that is not known, or heads rotated in part in a family that rotates them whole.
        DataError: a number is missing, is not positive, or does not fit a head.
    """
    hf = {**hf, **{plain: hf[own] for plain, own in names.items() if hf.get(own) is not None}}
    own: dict[str, Any] = {}
    if _WINDOW_THETA in defaults:
        hf, own["window_rotary_base"] = _by_layer(hf, defaults)
    base, scaling = read_rope(hf, defaults)
    share = _first(_said(hf, defaults).get(_SHARE), hf.get(_SHARE), defaults.get(_SHARE), 1.0)
    if share != 1 and _SHARE not in defaults:
        raise UsageError(f"{_SHARE}={share}: heads of this family are rotated whole.")
    width = int(head_width * share) if isinstance(share, int | float) else 0
    if not 0 < width <= head_width or width % 2:
        raise DataError(f"config.json: {_SHARE}={share!r} of {head_width} channels is no number of pairs.")
    for name in _LISTS:
        if scaling is not None and (factors := getattr(scaling, name)) and len(factors) != width // 2:
            raise DataError(f"config.json: {name} needs {width // 2} numbers, got {len(factors)}.")
    return {"rotary_base": base, "rope_scaling": scaling, "rotary_percent": float(share), **own}


def _by_layer(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """The config with the settings of layers without window alone, and the base of those with one."""
    nested = hf.get("rope_parameters") or {}
    if strange := [key for key in nested if key not in _LAYERED]:
        raise UsageError(f"rope_parameters: {', '.join(strange)} is not a kind of layer; {' and '.join(_LAYERED)} are.")
    full, windowed = (dict(nested.get(kind) or {}) for kind in _LAYERED)
    theta = _first(windowed.pop("rope_theta", None), hf.get(_WINDOW_THETA), defaults[_WINDOW_THETA])
    if windowed.pop("rope_type", "default") != "default" or windowed:
        raise UsageError(
            "rope_parameters: the frequencies of layers with a window are not stretched; make them default."
        )
    if not isinstance(theta, int | float) or theta <= 0:
        raise DataError(f"config.json: {_WINDOW_THETA} must be a positive number, got {theta!r}.")
    return {**hf, "rope_parameters": full | dict(hf.get("rope_scaling") or {}), "rope_scaling": None}, float(theta)


def read_rope(hf: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> tuple[float, RopeScaling | None]:
    """Return ``(rotary_base, scaling)``; ``defaults`` are the settings of a config that says nothing of them.

    Raises:
        UsageError: a kind of scaling other than those of ``_NEEDED``.
        DataError: theta, or a number that its kind of scaling needs, is missing or not positive.
    """
    defaults = defaults or {}
    said = _said(hf, defaults)
    theta = _first(said.get("rope_theta"), hf.get("rope_theta"), defaults.get("rope_theta"), _DEFAULT_THETA)
    if not isinstance(theta, int | float) or theta <= 0:
        raise DataError(f"config.json: rope_theta must be a positive number, got {theta!r}.")
    said.pop(_SHARE, None)
    kind = said.get("rope_type", said.get("type", "default"))
    kind = _ALIASES.get(kind, kind)
    if kind not in _NEEDED:
        raise UsageError(f"rope type '{kind}' is not supported; known are {', '.join(_NEEDED)}.")
    if kind == "default":
        said.pop("factor", None)
    if unknown := sorted(said.keys() - _KNOWN):
        raise UsageError(f"rope settings {', '.join(unknown)} are not known for rope type '{kind}'.")
    if kind == "default":
        return float(theta), None
    context = hf.get("max_position_embeddings")
    said[_CONTEXT] = _first(hf.get(_CONTEXT), defaults.get(_CONTEXT), said.get(_CONTEXT), context)
    if kind in ("yarn", "longrope") and said.get("factor") is None and context and said[_CONTEXT]:
        said["factor"] = context / said[_CONTEXT]
    for key in _NEEDED[kind]:
        given = said.get(key)
        numbers = given if key in _LISTS and isinstance(given, Sequence) and given else [given]
        if not all(isinstance(number, int | float) and number > 0 for number in numbers):
            raise DataError(f"config.json: rope type '{kind}' needs a positive {key}, got {given!r}.")
    chosen = [*_NEEDED[kind], *(key for key in _OPTIONAL.get(kind, ()) if said.get(key) is not None)]
    values: dict[str, Any] = {key: _TYPES.get(key, float)(said[key]) for key in chosen}
    return float(theta), RopeScaling(kind=kind, **values)


def write_rotary(
    arch: Architecture, base: Mapping[str, Any], defaults: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, Any]:
    """Both spellings of the architecture's rotary settings; words of ``base`` with the same meaning are kept."""
    plain = {**base, **{plain: base[own] for plain, own in names.items() if base.get(own) is not None}}
    if _WINDOW_THETA in defaults:
        plain = _by_layer(plain, defaults)[0]
    said = write_rope(arch, plain, defaults)
    if _SHARE in defaults:
        said["rope_parameters"][_SHARE] = arch.rotary_percent
        if arch.rotary_percent != _first(plain.get(_SHARE), defaults[_SHARE]):
            said[_SHARE] = arch.rotary_percent
    if _CONTEXT in defaults and arch.rope_scaling is not None:
        said[_CONTEXT] = arch.rope_scaling.original_max_position_embeddings
    if _WINDOW_THETA in defaults:
        theta = _first(arch.window_rotary_base, defaults[_WINDOW_THETA])
        windowed = {"rope_type": "default", "rope_theta": theta}
        said["rope_parameters"] = dict(zip(_LAYERED, (said["rope_parameters"], windowed), strict=True))
        said[_WINDOW_THETA] = theta
    return {names.get(key, key): value for key, value in said.items()}


def write_rope(
    arch: Architecture, base: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What :func:`read_rope` reads, in both spellings."""
    scaling: dict[str, Any] | None = None
    if (found := arch.rope_scaling) is not None:
        scaling = _said(base, {}) if read_rope(base, defaults) == (arch.rotary_base, found) else {}
        for key in ("rope_theta", _SHARE):
            scaling.pop(key, None)
        if not scaling:
            said = [key for key in _OPTIONAL.get(found.kind, ()) if getattr(found, key) != _DEFAULTS[key]]
            values = {key: getattr(found, key) for key in (*_NEEDED[found.kind], *said)}
            scaling = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        scaling |= {"rope_type": found.kind}
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
