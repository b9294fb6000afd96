"""Rotary settings of a Hugging Face config: ``rope_parameters`` of transformers 5, and the older keys.

Exports contain both: older readers ignore ``rope_parameters`` and silently use a theta of 10000.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.blocks.rotary import QueryScaling, RopeScaling

_DEFAULT_THETA = 10000.0
_MAX_NUMBER = 1e38
_CONTEXT = "original_max_position_embeddings"
_SHARE = "partial_rotary_factor"
_WIDTH = "rotary_dim"
"""Rotated channels, in place of the fraction, of families that have a default for it."""
_LISTS = ("short_factor", "long_factor")
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _CONTEXT),
    "yarn": ("factor", _CONTEXT),
    "longrope": ("factor", _CONTEXT, *_LISTS),
    "ntk_alpha": ("factor",),
    "dynamic": ("factor", _CONTEXT),
    "proportional": (_SHARE,),
}
_READABLE = [kind for kind in _NEEDED if kind not in ("ntk_alpha", "proportional")]
_OPTIONAL = {
    "yarn": ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor"),
    "longrope": ("attention_factor",),
    "proportional": ("factor",),
}
_TYPES: Mapping[str, Callable[[Any], Any]] = {_CONTEXT: int, "truncate": bool} | dict.fromkeys(_LISTS, tuple)
_ALIASES = {"su": "longrope"}
_DEFAULTS = {field.name: field.default for field in fields(RopeScaling)}
_KNOWN = {"rope_type", "type", "rope_theta", _SHARE, *_NEEDED["llama3"], *_OPTIONAL["yarn"], *_LISTS}
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""They select among the positions of a token in an image, which are all the same in a text. Families of language models
beside a vision tower have a default for the first one."""
_LAYERED = ("full_attention", "sliding_attention")
_WINDOW_THETA = "rope_local_base_freq"
_ALPHA = "alpha"
"""The factor of ``ntk_alpha``, in configs of ``dynamic`` scaling. A family that supports it has a default for it."""
_QUERY_RATE = "llama_4_scaling_beta"
"""Key of families that have a default for it: queries grow with the position."""
_PROPORTIONAL = "proportional"
"""Kind of families whose default it is: the share of rotated channels is a setting of this kind of scaling."""
_MAGNITUDES = ("short_mscale", "long_mscale")
"""LongRoPE's ``attention_factor`` within and beyond the original length, of families that have a default for them."""


def read_rotary(
    hf: Mapping[str, Any], defaults: Mapping[str, Any], names: Mapping[str, str], head_width: int, window_width: int
) -> dict[str, Any]:
    """The rotary fields of the Architecture.

    ``names``: the family's names of ``rope_theta`` and ``partial_rotary_factor``, if they differ. A default for
    ``rope_local_base_freq`` means that sliding-window layers have another base, and fraction if there is a default for
    it; None is the default of ``rope_theta``, without a key outside of ``rope_parameters``. The default None for
    ``partial_rotary_factor`` means that the class does not use it. The widths are those of heads, in layers with full
    attention and with a window.
    """
    hf = {**hf, **{plain: hf[name] for plain, name in names.items() if hf.get(name) is not None}}
    window: dict[str, Any] = {}
    if _WINDOW_THETA in defaults:
        hf, windowed = _by_layer(hf, defaults)
        window["window_rotary_base"] = windowed["rope_theta"]
        if _SHARE in defaults:
            share = window["window_attention.rotary_percent"] = windowed[_SHARE]
            _rotated(share, window_width)
    base, scaling = _read_rope(hf, defaults)
    width_share = hf[_WIDTH] / head_width if isinstance(hf.get(_WIDTH), int) and _WIDTH in defaults else None
    shares = (_flat_settings(hf, defaults).get(_SHARE), hf.get(_SHARE)) if defaults.get(_SHARE, 1) is not None else ()
    share = _first(*(shares[1:] if _is_proportional(scaling) else shares), width_share, defaults.get(_SHARE), 1.0)
    if share != 1 and _SHARE not in defaults:
        raise UsageError(f"{_SHARE}={share} is not supported for this family; it must be 1.")
    width = _rotated(share, head_width)
    for name in _LISTS:
        if scaling is not None and (factors := getattr(scaling, name)) and len(factors) != width // 2:
            raise DataError(f"config.json: {name} must have {width // 2} numbers, got {len(factors)}.")
    if _QUERY_RATE in defaults:
        window["query_scaling"] = _query_scaling(hf, defaults)
    return {"rotary_base": base, "rope_scaling": scaling, "rotary_percent": float(share), **window}


def _query_scaling(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> QueryScaling:
    settings = _flat_settings(hf, defaults)
    rate, period = settings.get(_QUERY_RATE), settings.get(_CONTEXT)
    if not isinstance(rate, int | float) or not 0 <= rate < _MAX_NUMBER or not isinstance(period, int) or period < 1:
        raise DataError(
            f"config.json: rope_parameters needs a {_QUERY_RATE} and a positive {_CONTEXT}, got {rate!r} and "
            f"{period!r}."
        )
    return QueryScaling(rate=float(rate), period=period)


def _rotated(share: Any, head_width: int) -> int:
    """Rotated channels of a head."""
    width = int(head_width * share) if isinstance(share, int | float) and 0 < share <= 1 else 0
    if not 0 < width <= head_width or width % 2:
        raise DataError(f"config.json: {_SHARE}={share!r} of head_dim {head_width} must be an even number of channels.")
    return width


def _by_layer(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """The config with the rotary settings of full-attention layers only, and those of sliding-window layers."""
    nested = hf.get("rope_parameters") or {}
    if unknown := [key for key in nested if key not in _LAYERED] if isinstance(nested, Mapping) else []:
        theta = {name: nested[name] for name in ("rope_theta",) if name in nested}
        layered = dict(zip(_LAYERED, (nested, {"rope_type": "default"} | theta), strict=True))
        raise UsageError(
            f"rope_parameters: {', '.join(unknown)} is not a kind of layer; {' and '.join(_LAYERED)} are, and "
            "transformers ignores settings outside of them. To scale the positions of full attention, write "
            f"rope_parameters: {json.dumps(layered)}{'' if theta else ', and the rope_theta of both'}."
        )
    if not isinstance(nested, Mapping) or not all(
        isinstance(parameters or {}, Mapping) for parameters in nested.values()
    ):
        raise DataError(f"config.json: rope_parameters must have an object for each kind of layer, got {nested!r}.")
    full, windowed = (dict(nested.get(kind) or {}) for kind in _LAYERED)
    default = defaults[_WINDOW_THETA]
    outside = defaults["rope_theta"] if default is None else _first(hf.get(_WINDOW_THETA), default)
    theta = _first(windowed.pop("rope_theta", None), outside)
    share = _first(windowed.pop(_SHARE, None), hf.get(_SHARE), defaults.get(_SHARE), 1.0)
    if share != 1 and _SHARE not in defaults:
        raise UsageError(f"rope_parameters: {_SHARE}={share} is not supported for this family; it must be 1.")
    if windowed.pop("rope_type", "default") != "default" or windowed:
        raise UsageError(
            "rope_parameters: rope scaling is not supported in sliding_attention layers; use rope_type default."
        )
    if not isinstance(theta, int | float) or not 0 < theta < _MAX_NUMBER:
        raise DataError(f"config.json: {_WINDOW_THETA} must be a positive number, got {theta!r}.")
    rope = {"rope_parameters": full | dict(hf.get("rope_scaling") or {}), "rope_scaling": None}
    return {**hf, **rope}, {"rope_theta": float(theta), _SHARE: share}


def _read_rope(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    settings = _flat_settings(hf, defaults)
    theta = _first(settings.get("rope_theta"), hf.get("rope_theta"), defaults.get("rope_theta"), _DEFAULT_THETA)
    if not isinstance(theta, int | float) or not 0 < theta < _MAX_NUMBER:
        raise DataError(f"config.json: rope_theta must be a positive number, got {theta!r}.")
    kind, settings = _kind_and_settings(settings, defaults)
    if kind == "default":
        settings.pop("factor", None)
    if unknown := sorted(settings.keys() - _KNOWN):
        raise UsageError(f"unknown rope settings for rope type '{kind}': {', '.join(unknown)}.")
    if kind == "default":
        return float(theta), None
    context = hf.get("max_position_embeddings")
    original_context = _first(hf.get(_CONTEXT), defaults.get(_CONTEXT), settings.get(_CONTEXT), context)
    if kind == "dynamic" and original_context != context:
        raise UsageError(
            f"rope type 'dynamic' with {_CONTEXT}={original_context} is not supported: it stretches the rotation of "
            f"samples beyond max_position_embeddings, which is {context}. Make them equal."
        )
    settings[_CONTEXT] = original_context
    if kind in ("yarn", "longrope") and settings.get("factor") is None and context and original_context:
        settings["factor"] = context / original_context
    return float(theta), RopeScaling(kind=kind, **_checked_values(kind, settings))


def _kind_and_settings(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The kind of scaling, and its settings without those that are read elsewhere."""
    read_elsewhere = {_SHARE}
    for names in (_OF_IMAGES, (_QUERY_RATE, "max_position_embeddings")):
        read_elsewhere |= {*names} if names[0] in defaults else set()
    share = settings.get(_SHARE)
    settings = {name: value for name, value in settings.items() if name not in read_elsewhere}
    rope_type = settings.get("rope_type", settings.get("type", "default"))
    if not isinstance(rope_type, str):
        raise DataError(f"config.json: rope_type must be a name such as 'yarn', got {rope_type!r}.")
    kind = _ALIASES.get(rope_type, rope_type)
    if kind == "mrope" and _OF_IMAGES[0] in defaults:
        kind = "default"
    if kind == "dynamic" and _ALPHA in defaults and settings.get(_ALPHA):
        kind, settings = "ntk_alpha", {"factor": settings[_ALPHA]}
    elif kind == _PROPORTIONAL and _default_kind(defaults) == _PROPORTIONAL:
        settings = {**settings, _SHARE: 1.0 if share is None else share}
    elif kind not in _READABLE:
        raise UsageError(f"rope type '{kind}' is not supported; supported are {', '.join(_READABLE)}.")
    if kind == "yarn" and settings.get(_LISTS[0]):  # configs of early Phi-3 models
        kind = "longrope"
    if _MAGNITUDES[0] in defaults and kind != "default":
        settings["attention_factor"] = _magnitude(settings, kind)
    return kind, settings


def _checked_values(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of :class:`RopeScaling`; DataError for a value that is missing or no number."""
    for key in _NEEDED[kind]:
        value = settings.get(key)
        numbers = value if key in _LISTS and isinstance(value, Sequence) and value else [value]
        if not all(isinstance(number, int | float) and 0 < number < _MAX_NUMBER for number in numbers):
            raise DataError(f"config.json: rope type '{kind}' needs a positive {key}, got {value!r}.")
    chosen = [*_NEEDED[kind], *(key for key in _OPTIONAL.get(kind, ()) if settings.get(key) is not None)]
    for key in chosen:
        if key not in _LISTS and not (isinstance(settings[key], int | float) and abs(settings[key]) < _MAX_NUMBER):
            raise DataError(f"config.json: {key} of rope type '{kind}' must be a number, got {settings[key]!r}.")
    if kind == _PROPORTIONAL and settings[_SHARE] > 1:
        raise DataError(f"config.json: {_SHARE} must be at most 1, got {settings[_SHARE]!r}.")
    return {key: _TYPES.get(key, float)(settings[key]) for key in chosen}


def _is_proportional(scaling: RopeScaling | None) -> bool:
    return scaling is not None and scaling.kind == _PROPORTIONAL


def _default_kind(defaults: Mapping[str, Any]) -> Any:
    return (defaults.get("rope_parameters") or {}).get("rope_type")


def _magnitude(settings: dict[str, Any], kind: str) -> Any:
    short, long = (settings.pop(name, None) for name in _MAGNITUDES)
    if kind != "longrope" or short is None or short != long:
        raise UsageError(
            f"rope type '{kind}' with short_mscale={short} and long_mscale={long} is not supported for this family; "
            "longrope with two equal ones is."
        )
    return short


def write_rotary(
    arch: Architecture, base: Mapping[str, Any], defaults: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, Any]:
    """Config keys of the rotary settings; equivalent settings of ``base`` are kept."""
    plain = {**base, **{plain: base[spelling] for plain, spelling in names.items() if base.get(spelling) is not None}}
    if _WINDOW_THETA in defaults:
        plain = _by_layer(plain, defaults)[0]
    settings = _write_rope(arch, plain, defaults)
    if _OF_IMAGES[0] in defaults:
        earlier = {**(plain.get("rope_scaling") or {}), **(plain.get("rope_parameters") or {})}
        settings["rope_parameters"] |= {name: earlier[name] for name in _OF_IMAGES if name in earlier}
    is_default = arch.rotary.rotary_percent == defaults.get(_SHARE) == 1
    if defaults.get(_SHARE) is not None and not (
        is_default and _SHARE not in (plain.get("rope_parameters") or defaults)
    ):
        settings["rope_parameters"][_SHARE] = arch.rotary.rotary_percent
        if arch.rotary.rotary_percent != _first(plain.get(_SHARE), defaults[_SHARE]):
            settings[_SHARE] = arch.rotary.rotary_percent
    if _CONTEXT in defaults and arch.rotary.rope_scaling is not None:
        settings[_CONTEXT] = arch.rotary.rope_scaling.original_max_position_embeddings
    if _WINDOW_THETA in defaults:
        theta = _first(arch.windows.window_rotary_base, defaults[_WINDOW_THETA], defaults["rope_theta"])
        windowed = {"rope_type": "default", "rope_theta": theta}
        windowed |= {_SHARE: arch.windows.rotary(arch.rotary).rotary_percent} if _SHARE in defaults else {}
        settings["rope_parameters"] = dict(zip(_LAYERED, (settings["rope_parameters"], windowed), strict=True))
        settings |= {} if defaults[_WINDOW_THETA] is None else {_WINDOW_THETA: theta}
    if _QUERY_RATE in defaults and (growth := arch.attention.query_scaling) is not None:
        for written in filter(None, (settings["rope_parameters"], settings["rope_scaling"])):
            written |= {_QUERY_RATE: growth.rate, _CONTEXT: growth.period}
    return {names.get(key, key): value for key, value in settings.items()}


def _write_rope(arch: Architecture, base: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that ``_read_rope`` reads, old and new."""
    scaling: dict[str, Any] | None = None
    if (rope := arch.rotary.rope_scaling) is not None:
        scaling = _flat_settings(base, {}) if _read_rope(base, defaults) == (arch.rotary.rotary_base, rope) else {}
        for key in ("rope_theta", _SHARE) if rope.kind != _PROPORTIONAL else ("rope_theta",):
            scaling.pop(key, None)
        if not scaling:
            settings = [key for key in _OPTIONAL.get(rope.kind, ()) if getattr(rope, key) != _DEFAULTS[key]]
            values = {key: getattr(rope, key) for key in (*_NEEDED[rope.kind], *settings)}
            scaling = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        if _MAGNITUDES[0] in defaults:
            scaling |= dict.fromkeys(_MAGNITUDES, rope.attention_factor)
        if rope.kind == "ntk_alpha":
            scaling |= {"rope_type": "dynamic", _ALPHA: rope.factor, "factor": 1.0}
        else:
            scaling |= {"rope_type": rope.kind}
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": arch.rotary.rotary_base}
    return {"rope_parameters": parameters, "rope_theta": arch.rotary.rotary_base, "rope_scaling": scaling}


def _flat_settings(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_scaling`` has precedence over ``rope_parameters``."""
    settings = hf.get("rope_scaling") or hf.get("rope_parameters") or defaults.get("rope_parameters") or {}
    if not isinstance(settings, Mapping):
        raise DataError(f"config.json: rope settings must be an object, got {settings!r}.")
    if nested := [key for key, value in settings.items() if isinstance(value, Mapping)]:
        raise UsageError(f"rope settings that differ by layer ({', '.join(nested)}) are not supported.")
    return dict(settings)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
