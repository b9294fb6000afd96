"""Other values of settings, which show whether a family gives a setting its meaning."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from isthmus.errors import UsageError
from isthmus.families.family import Family
from isthmus.families.rules.common_settings import METADATA, is_dropout

_IF_ABSENT: Mapping[str, tuple[Any, ...]] = {
    "sliding_window": (5,),
    "final_logit_softcapping": (1.5,),
    "attn_logit_softcapping": (0.7,),
}
_LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
_ROPES: tuple[Mapping[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", **_LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
)


def other_values(name: str, value: Any, family: Family, rotary_pairs: int) -> list[Any]:
    """Values to try in place of this one; none if the setting is of an unknown kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [other for other in dict.fromkeys((value + 1, value * 2, 1)) if other != value]
    if isinstance(value, float):
        return [value * 2, value / 2 + 0.1]
    if isinstance(value, str):
        choices = [key.choices for key in family.keys.values() if key.hf == name and key.choices is not None]
        words = [*(choices[0] if choices else ()), *(family.fixed[name].allowed if name in family.fixed else ())]
        return [word for word in dict.fromkeys(words) if word != value]
    if isinstance(value, list):
        return [permuted for permuted in (value[1:] + value[:1], value[::-1]) if permuted != value]
    if name == "rope_parameters" and isinstance(value, Mapping):
        return _other_ropes(value, rotary_pairs)
    return list(_IF_ABSENT.get(name, ()))


def _other_ropes(value: Mapping[str, Any], pairs: int) -> list[Any]:
    if any(isinstance(inner, Mapping) for inner in value.values()):
        return [
            {**value, kind: {**inner, "rope_theta": inner.get("rope_theta", 1e4) * 0.5}}
            for kind, inner in value.items()
            if isinstance(inner, Mapping)
        ]
    ropes: list[Any] = [{**value, "rope_theta": value.get("rope_theta", 1e4) * 0.1}]
    if value.get("rope_type", "default") == "default":
        ropes += [{**value, **rope} for rope in _ROPES]
        factors = {"short_factor": [1.0] * pairs, "long_factor": [1.5] * (pairs - 1) + [3.0]}
        ropes.append(
            {**value, **factors, "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16}
        )
    if (share := value.get("partial_rotary_factor")) is not None:
        ropes.append({**value, "partial_rotary_factor": 0.5 if share != 0.5 else 1.0})
    return ropes


def independent_defaults(defaults: Mapping[str, Any], change: Callable[[str, Any], Mapping[str, Any]]) -> set[str]:
    """Settings whose default does not depend on another's number; ``change`` completes a config with one number."""
    independent = {name for name, value in defaults.items() if not isinstance(value, list | dict)}
    for name, value in defaults.items():
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            try:
                other = change(name, value * 2)
            except UsageError:
                continue
            independent -= {
                dependent
                for dependent in independent
                if dependent != name and other.get(dependent) != defaults[dependent]
            }
    return independent


def fixed_settings(
    config: Mapping[str, Any], defaults: Mapping[str, Any], free: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Settings that must keep this value, in the format of ``families/discover/json_family.py``."""
    fixed: dict[str, dict[str, Any]] = {}
    for name, value in sorted(config.items()):
        if name in free or METADATA.fullmatch(name):
            continue
        absent = defaults.get(name)
        if is_dropout(name) and isinstance(value, int | float):
            fixed[name] = {"is": 0.0, "absent": absent, "training": True}
        elif isinstance(value, list) and value and all(entry == value[0] for entry in value):
            fixed[name] = {"each": value[0], "absent": absent}
        else:
            fixed[name] = {"is": value, "absent": absent}
    return fixed


def repeated_sizes(
    names: Collection[str], read: Collection[str], configs: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[str, ...]]:
    """Sizes among ``names`` that are another size, or the sum of two sizes of queries and keys, in all ``configs``.

    ``read`` are the sizes with a known meaning.
    """
    singles = [(name,) for name in sorted(read)]
    query_sizes = [name for name in sorted(read) if name.startswith("qk_")]
    ways = [*singles, *itertools.combinations(query_sizes, 2)]
    sums_by_name: dict[str, tuple[str, ...]] = {}
    for name in sorted(names):
        values = [config.get(name) for config in configs]
        if len(set(values)) > 1 and all(type(value) is int for value in values):
            sums = {way: [sum(config.get(size) or 0 for size in way) for config in configs] for way in ways}
            way = next((way for way, sizes in sums.items() if sizes == values), None)
            sums_by_name |= {} if way is None else {name: way}
    return sums_by_name
