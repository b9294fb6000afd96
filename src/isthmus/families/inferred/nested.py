"""The file of a multimodal model type whose language model was inferred.

It has the data of that language model (``language``), where its config and tensors are, and all settings beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.family import Family
from isthmus.families.inferred.json_family import WHY, reading, refuse_others
from isthmus.families.inferred.related import check_related_settings, read_related
from isthmus.families.multimodal import multimodal
from isthmus.families.nested import Nested
from isthmus.families.rules.rule import Shape

SECTION, TIED = "text_config", "tie_word_embeddings"


@dataclass(frozen=True, slots=True)
class LanguageSection:
    """Which part of configs and tensors the search of a family sees."""

    name: str
    hf_architecture: str
    nested: Nested | None
    """None: all of them."""
    module_names: Mapping[str, str]

    @property
    def key(self) -> str | None:
        """The key of the section."""
        return None if self.nested is None else SECTION

    def config(self, whole: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config of the language model."""
        return whole if self.nested is None else self.nested.language_config(whole)

    def changed(self, whole: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
        """The whole config with another value of a setting of the language model."""
        return {**whole, name: value} if self.nested is None else {**whole, SECTION: {**whole[SECTION], name: value}}

    def family(self, language: Family) -> Family:
        """The family of the whole model."""
        if self.nested is None:
            return language
        return multimodal(
            self.name,
            self.hf_architecture,
            language,
            towers=self.nested.towers,
            tied=self.nested.tied,
            names={},
            module_names=self.module_names,
            other_names={},
        )

    def tensors(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Tensors of the language model."""
        return {name: shape for name, shape in shapes.items() if self.nested is None or not self.nested.is_tower(name)}


def read_nested(data: Mapping[str, Any], families: Mapping[str, Family]) -> Family:
    """Raise DataError if a field is missing or of the wrong type, or the family that it is like is not installed."""
    with reading(data):
        language = read_related(data["language"], families)
        given = data["nested"]
        if given["tied"] not in (None, True, False):
            raise DataError(f"tied must be true, false or null, got {given['tied']!r:.60}.")
        nested = Nested(model_type=language.name, towers=tuple(map(str, given["towers"])), tied=given["tied"])
        names = {str(name): str(path) for name, path in given["module_names"].items()}
        section = LanguageSection(str(data["name"]), str(data["hf_architecture"]), nested, names)
        return replace(section.family(language), scored_class=None, data=data)


def check_nested_settings(data: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise UsageError for a setting, in the section or beside it, with which the mapping was not verified."""
    kind, section = data["language"]["name"], config.get(SECTION)
    if not isinstance(section, Mapping):
        raise DataError(f"config.json: {SECTION} must be the object of the language model, got {section!r:.60}.")
    if section.get("model_type", kind) != kind:
        raise UsageError(
            f"config.json: {data['name']} around a language model of type {section['model_type']!r:.60} is not "
            f"supported: {WHY}."
        )
    check_related_settings(data["language"], section)
    # Other sections are without effect on the language model.
    refuse_others(data, config, {*data["fixed"], *(name for name in config if name.endswith("_config"))})
    for entries, settings in ((data["fixed"], config), (data["fixed_in_section"], section)):
        for name, entry in entries.items():
            value = settings.get(name, entry["absent"])
            wanted = section.get(name, value) if entry.get("same_in_section", False) else entry["is"]
            if value != wanted:
                raise UsageError(f"config.json: {name}={value!r:.60} is not supported for {data['name']}: {WHY}.")
