"""The families that a model type may be like, compared by config and tensors; and the nearest one otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args, get_origin, get_type_hints

from isthmus.errors import IsthmusError, UsageError
from isthmus.families.architecture import COMPONENTS, Architecture
from isthmus.families.blocks.block import setting_fields
from isthmus.families.blocks.feed_forward import Experts
from isthmus.families.family import Derived, Family, Key
from isthmus.families.inferred.json_family import FORMAT
from isthmus.families.inferred.related import read_related
from isthmus.families.known_keys import IGNORED_KEYS, RecordingDict, is_metadata, keys_read
from isthmus.families.rules.common_settings import ROPE, is_dropout
from isthmus.families.rules.rule import Shape
from isthmus.tools.learn.config_inference import SIZE_WORDS

UNREADABLE = (IsthmusError, KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError)
"""What a family raises for the config of another."""
_MOST_DIFFERING = 8
"""Names that a candidate and the model may not share; another trait can add or remove some."""
_ROOTS = "embedding.word_embeddings.weight"
_HEAD = "lm_head.weight"
_SQUARE_ROOT = "hidden_size**0.5"
Data = dict[str, Any]


def settings_read(family: Family, config: Mapping[str, Any]) -> set[str]:
    """The settings of a config that the family uses."""
    recorded = RecordingDict(config)
    arch = family.to_architecture(recorded)
    rotary = {*ROPE, "original_max_position_embeddings", *family.rope_names.values()}
    return (recorded.read | (rotary if arch.embedding.position == "rope" else set())) & config.keys()


@dataclass(frozen=True, slots=True)
class Unknown:
    """A model type without a family: its config, completed by transformers, and the tensors of a model."""

    name: str
    hf_architecture: str
    config: Mapping[str, Any]
    defaults: Mapping[str, Any]
    """Values of absent settings."""
    shapes: Mapping[str, Shape]


def related_candidates(unknown: Unknown, families: Mapping[str, Family]) -> Iterator[tuple[Data, str]]:
    """Data of candidates that have the model's tensors, with a description: families first, then other traits."""
    likely: list[tuple[Family, Data]] = []
    for base in _nearest(unknown.config, families):
        if (data := _like(base, unknown)) is not None and _differing_names(data, unknown, families) <= _MOST_DIFFERING:
            donated = _with_donors(data, unknown, families)
            likely += [(base, data), *([(base, donated)] if donated["settings_of"] else [])]
    seen: list[Architecture] = []
    for number in (0, 1):
        for base, data in likely:
            for traits in _changes(base, data, unknown.config, families)[number]:
                changed = data | {"traits": data["traits"] | traits}
                if "embedding_multiplier" in traits:
                    changed |= {"traits": data["traits"], "derived": {"embedding_multiplier": _SQUARE_ROOT}}
                arch = _fitting(changed, unknown, families)
                if arch is not None and replace(arch, family="") not in seen:
                    seen.append(replace(arch, family=""))
                    with_traits = "".join(f", {name} {value}" for name, value in traits.items())
                    yield changed, f"{base.name}{with_traits}"


def _nearest(config: Mapping[str, Any], families: Mapping[str, Family]) -> list[Family]:
    """The families, those with the most settings in common first."""

    def distance(family: Family) -> int:
        names = {key.hf for key in family.keys.values()}
        return len(names - config.keys()) - len(names & config.keys()) - (1000 if family.name == model_type else 0)

    model_type = config.get("model_type")
    return sorted((family for family in families.values() if family.nested is None), key=distance)


def _like(base: Family, unknown: Unknown) -> Data | None:
    """Data of a family like ``base``; None if it cannot read the config."""
    config = unknown.config
    keys: dict[str, str] = {}
    traits: Data = {}
    used_keys = {key.hf for key in base.keys.values()}
    for name, key in base.keys.items():
        if not {key.hf, *key.aliases} & config.keys():
            other = next((word for word in SIZE_WORDS.get(name, ()) if word in config and word not in used_keys), None)
            if other is not None:
                keys[name] = other
                used_keys.add(other)
        try:
            replace(key, hf=keys.get(name, key.hf)).read(config)
        except UsageError:
            if key.choices is None:
                return None
            traits[name] = next(iter(key.choices.values()))
        except UNREADABLE:
            return None
        else:
            if name == "mtp_layers":
                traits[name] = 0  # transformers has no tensors of these layers
    unsupported = [
        name
        for name, fixed in base.fixed.items()
        if not fixed.training and config.get(name, fixed.absent) not in fixed.allowed
    ]
    return {
        "format": FORMAT,
        "name": unknown.name,
        "hf_architecture": unknown.hf_architecture,
        "like": base.name,
        "tensor_names": _renaming(base, unknown.shapes),
        "keys": keys,
        "settings_of": {},
        "traits": traits,
        "derived": {},
        "fixed": {name: {"is": config.get(name), "absent": unknown.defaults.get(name)} for name in unsupported},
        "settings": {},
    }


def _with_donors(data: Data, unknown: Unknown, families: Mapping[str, Family]) -> Data:
    """Fields that the family does not read from a setting of the config are read as another family does."""
    try:
        family = read_related(data, families)
        arch = family.to_architecture(unknown.config)
        unread = unknown.config.keys() - settings_read(family, unknown.config)
    except UNREADABLE:
        return data
    donors: dict[str, list[str]] = {}
    for donor in _nearest(unknown.config, families):
        ways: dict[str, Key | Derived] = {**donor.keys, **donor.derived}
        for name, way in ways.items():
            recorded = RecordingDict(unknown.config)
            try:
                value = way.read(recorded)
            except UNREADABLE:
                continue
            read_now = recorded.read & unread
            if read_now and name not in donors and value != arch.setting(name):
                donors[name] = [donor.name, "keys" if name in donor.keys else "derived"]
                unread = unread - read_now
    return data | {"settings_of": donors, "traits": {k: v for k, v in data["traits"].items() if k not in donors}}


def _differing_names(data: Data, unknown: Unknown, families: Mapping[str, Family]) -> int:
    """How many names only the candidate or only the model has; all layers and experts count as one."""
    try:
        family = read_related(data, families)
        names = family.hf_shapes(family.to_architecture(unknown.config)).keys()
    except UNREADABLE:
        return _MOST_DIFFERING + 1
    ours, theirs = ({re.sub(r"\d+", "N", name) for name in side} for side in (names, unknown.shapes))
    return len(ours ^ theirs)


def _renaming(base: Family, shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Replaces the root of the names, ``model.``, and that of the output layer, if the model has others."""
    embedding = next(rule.parts[0].name for rule in base.rules if rule.canonical == _ROOTS)
    root, _, last = embedding.removesuffix(".weight").rpartition(".")
    roots = [name.removesuffix(f"{last}.weight") for name in shapes if name.endswith(f".{last}.weight")]
    renaming = {f"{root}.": roots[0]} if root and roots and roots[0] != f"{root}." else {}
    heads = [name.removesuffix(_HEAD) for name in shapes if name.endswith(f".{_HEAD}")]
    return renaming | ({"lm_head.": f"{heads[0]}lm_head."} if len(heads) == 1 else {})


def _changes(
    base: Family, data: Data, config: Mapping[str, Any], families: Mapping[str, Family]
) -> tuple[list[Data], list[Data]]:
    """No change; and every change of one field that has few values."""
    try:
        arch = read_related(data, families).to_architecture(config)
    except UNREADABLE:
        return [], []
    single: list[Data] = []
    for name, values in _FEW_VALUES.items():
        current = arch.setting(name)
        if current is not None or "." not in name:
            single += [{name: value} for value in values if value != current]
    if arch.attention.attention_scale is None:
        single.append({"attention_scale": 1.0})
    if arch.head.logits_multiplier != 1:
        single.append({"logits_multiplier": 1.0})
    if arch.embedding.embedding_multiplier == 1:
        single.append({"embedding_multiplier": _SQUARE_ROOT})
    return [{}], single


def _fitting(data: Data, unknown: Unknown, families: Mapping[str, Family]) -> Architecture | None:
    """The architecture of a candidate; None if the model has other tensors."""
    try:
        family = read_related(data, families)
        arch = family.to_architecture(unknown.config)
        return arch if family.hf_shapes(arch) == dict(unknown.shapes) else None
    except UNREADABLE:
        return None


def _few_values() -> dict[str, tuple[Any, ...]]:
    """The values of each field of the Architecture and of its Experts that is a flag or a word."""
    values: dict[str, tuple[Any, ...]] = {}
    for component in COMPONENTS:
        if component.prefix not in ("", Experts.prefix):
            continue
        hints, prefix = get_type_hints(component), f"{component.prefix}." if component.prefix else ""
        for field in setting_fields(component):
            if hints[field.name] is bool:
                values[prefix + field.name] = (False, True)
            elif str(get_origin(hints[field.name])).endswith("Literal"):
                values[prefix + field.name] = get_args(hints[field.name])
    return {name: allowed for name, allowed in values.items() if name not in ("score_head", "tie_embeddings")}


_FEW_VALUES = _few_values()


@dataclass(frozen=True, slots=True)
class Relative:
    """A family, and in what the settings of a config differ from its own."""

    family: str
    unread: tuple[str, ...]
    """Settings of the config that the family does not read."""
    missing: tuple[str, ...]
    """Settings of the family that the config does not have."""

    @property
    def description(self) -> str:
        """A sentence."""
        clauses = [f"does not read {', '.join(self.unread)}"] if self.unread else []
        clauses += [f"reads {', '.join(self.missing)}, which the config lacks"] if self.missing else []
        differences = " and ".join(clauses) or "has the same settings"
        return f"The nearest family is {self.family}, which {differences}."


def nearest_family(config: Mapping[str, Any], families: Mapping[str, Family]) -> Relative:
    """The family with the fewest settings that it or the config has alone; ``config`` is that of a language model.

    Families of multimodal classes are not compared.
    """
    settings = {
        name for name in config if not (is_metadata(name) or is_dropout(name) or name in IGNORED_KEYS)
    }  # without those that do not tell models apart

    def relative(family: Family) -> Relative:
        keys = {key.hf for key in family.keys.values()}
        try:
            read = keys_read(family, config)
        except UNREADABLE:  # the config has not all that the family needs
            read = keys | family.fixed.keys()
        return Relative(family.name, tuple(sorted(settings - read)), tuple(sorted(keys - config.keys())))

    relatives = [relative(family) for family in families.values() if family.nested is None]
    return min(relatives, key=lambda each: len(each.unread) + len(each.missing))
