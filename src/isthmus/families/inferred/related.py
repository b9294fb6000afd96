"""A model type that is a supported family with another name, other tensor names, and a few other traits.

Its JSON file names that family (``like``) and lists every setting of its configs: those that the family reads and whose
meaning was verified, and those that must keep their value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.family import Derived, Family, Fixed
from isthmus.families.inferred.json_family import noise_of, parse_formula, read_fixed, reading, refuse_others
from isthmus.families.rules.common_settings import ROPE
from isthmus.families.rules.rule import renamed


def read_related(data: Mapping[str, Any], families: Mapping[str, Family]) -> Family:
    """Raise DataError if a field is missing or of the wrong type, or the family that it is like is not installed."""
    with reading(data):
        if data["like"] not in families:
            raise DataError(f"it is like the family {data['like']!r}, which this version does not have.")
        base, traits, formulas = families[data["like"]], dict(data["traits"]), dict(data["derived"])
        own = traits.keys() | formulas.keys()
        keys = {
            name: replace(key, hf=data["keys"].get(name, key.hf), aliases=() if name in data["keys"] else key.aliases)
            for name, key in base.keys.items()
            if name not in own
        }
        derived = {name: way for name, way in base.derived.items() if name not in own}
        for name, (donor, kind) in data["settings_of"].items():
            keys.pop(name, None)
            derived.pop(name, None)
            target: dict[str, Any] = keys if kind == "keys" else derived
            target[name] = getattr(families[donor], kind)[name]
        derived |= {name: Derived(parse_formula(text, {}), lambda _value, _arch: {}) for name, text in formulas.items()}
        return replace(
            base,
            name=data["name"],
            hf_architecture=data["hf_architecture"],
            scored_class=None,
            keys=keys,
            derived=derived,
            traits={**{name: value for name, value in base.traits.items() if name not in own}, **traits},
            fixed={**base.fixed, **_read_fixed(data["fixed"])},
            dropout={},
            auto_map={},
            rules=renamed(base.rules, data["tensor_names"]),
            defaults={name: entry["default"] for name, entry in data["settings"].items() if "default" in entry},
            required=tuple(name for name, entry in data["settings"].items() if "default" not in entry),
            untrainable=base.untrainable or noise_of(data["fixed"]),
            data=data,
        )


def check_related_settings(data: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise UsageError if a config has settings that were absent when the family was inferred."""
    known = data["settings"].keys() | data["fixed"].keys() | {"rope_scaling", "rope_theta"}
    known |= {name for name in ROPE if name in config and _is_repeated(config[name], config.get("rope_parameters"))}
    refuse_others(data, config, known)
    for name, entry in data["fixed"].items():
        value, sizes = config.get(name, entry.get("absent")), entry.get("sum_of", ())
        if sizes and value is not None and value != sum(_setting(data, config, size) for size in sizes):
            needed = " + ".join(sizes)
            raise UsageError(
                f"config.json: {name}={value!r:.60} is not supported for {data['name']}; it must be {needed}."
            )


def _setting(data: Mapping[str, Any], config: Mapping[str, Any], name: str) -> int:
    value = config.get(name, data["settings"].get(name, {}).get("default"))
    return value if isinstance(value, int) else 0


def _read_fixed(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Fixed]:
    """Without sizes that repeat others, which :func:`check_related_settings` compares."""
    return {name: read_fixed(entry) for name, entry in entries.items() if "sum_of" not in entry}


def _is_repeated(value: Any, rotary: Any) -> bool:
    """Whether rotary settings, of all layers or of one kind of them, have this value."""
    return isinstance(rotary, Mapping) and any(
        each == value or _is_repeated(value, each) for each in rotary.values() if type(each) is not bool
    )
