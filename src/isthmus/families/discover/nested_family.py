"""The file of a multimodal model type whose language model was inferred.

It has the data of that language model (``language``), where its config and tensors are, and all settings beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.discover.config_inference import METADATA, WHY
from isthmus.families.discover.json_family import FORMAT
from isthmus.families.discover.language_section import SECTION, TIED, LanguageSection
from isthmus.families.discover.related_family import check_related_settings, read_related
from isthmus.families.family import Family
from isthmus.families.nested import Nested

Data = dict[str, Any]


def nested_data(section: LanguageSection, language: Data, fixed: Mapping[str, Any], tied: Mapping[str, Any]) -> Data:
    """The data of the whole model.

    ``fixed`` are the settings outside of the sections, some of which repeat one of the section. ``tied`` is the entry
    of ``tie_word_embeddings`` in the section, like one of ``fixed``.
    """
    assert section.nested is not None
    nested = {"tied": section.nested.tied, "towers": list(section.nested.towers)}
    return {
        "format": FORMAT,
        "name": section.name,
        "hf_architecture": section.hf_architecture,
        "nested": nested | {"module_names": dict(section.module_names)},
        "fixed": dict(fixed),
        "fixed_in_section": {TIED: dict(tied)},
        "language": {name: value for name, value in language.items() if name != "proof"},
        "proof": language["proof"],
    }


def read_nested(data: Mapping[str, Any], families: Mapping[str, Family]) -> Family:
    """Raise DataError if a field is missing or of the wrong type, or the family that it is like is not installed."""
    try:
        if data["format"] != FORMAT:
            raise DataError(f"format {data['format']!r} is not supported, only {FORMAT}.")
        language = read_related(data["language"], families)
        given = data["nested"]
        if given["tied"] not in (None, True, False):
            raise DataError(f"tied must be true, false or null, got {given['tied']!r:.60}.")
        nested = Nested(model_type=language.name, towers=tuple(map(str, given["towers"])), tied=given["tied"])
        names = {str(name): str(path) for name, path in given["module_names"].items()}
        section = LanguageSection(str(data["name"]), str(data["hf_architecture"]), nested, names)
        return replace(section.family(language), scored_class=None, data=data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{type(error).__name__}: {error}.") from None


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
    known = data["fixed"].keys()
    if unknown := [name for name in config if name not in known and not _is_free(name)]:
        raise UsageError(f"config.json: {', '.join(unknown)} is not supported for {data['name']}: {WHY}.")
    for entries, settings in ((data["fixed"], config), (data["fixed_in_section"], section)):
        for name, entry in entries.items():
            value = settings.get(name, entry["absent"])
            wanted = section.get(name, value) if entry.get("same_in_section", False) else entry["is"]
            if value != wanted:
                raise UsageError(f"config.json: {name}={value!r:.60} is not supported for {data['name']}: {WHY}.")


def _is_free(name: str) -> bool:
    """Whether a setting outside of the language model's section is without effect on it."""
    return name.endswith("_config") or METADATA.fullmatch(name) is not None
