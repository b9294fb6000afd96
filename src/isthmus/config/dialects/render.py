"""Prints a translated run as a config file: the remarks, then each setting with the option it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from isthmus.config.dialects.translation import OptionRemark, Translation
from isthmus.config.yaml_text import write_mapping


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``{"train.steps": 5}`` -> ``{"train": {"steps": 5}}``"""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, last = name.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return values


def as_yaml(translation: Translation, title: str) -> str:
    """``title`` (one or more lines) is the first comment."""
    lines = [f"# {line}".rstrip() for line in title.splitlines()]
    if translation.remarks:
        lines += ["#", "# Options without an equal setting:"]
        lines += [f"# - {remark_line(remark)}" for remark in translation.remarks]
    lines += [f"recipe: {translation.recipe}", *_section(nested(translation.settings), (), translation.origins)]
    return "\n".join(lines) + "\n"


def remark_line(remark: OptionRemark) -> str:
    return f"{remark.option} ({remark.status}): {remark.reason}"


def as_json(translation: Translation) -> dict[str, Any]:
    return {
        "config": {"recipe": translation.recipe, **nested(translation.settings)},
        "origins": dict(translation.origins),
        "remarks": [asdict(remark) for remark in translation.remarks],
        "world": asdict(translation.world),
    }


def _section(values: Mapping[str, Any], prefix: tuple[str, ...], origins: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * len(prefix)
    for name, value in values.items():
        key = (*prefix, name)
        if isinstance(value, dict) and value and ".".join(key) not in origins:
            yield f"{indent}{name}:"
            yield from _section(value, key, origins)
            continue
        first, *rest = write_mapping({name: value}).rstrip("\n").splitlines()
        origin = origins.get(".".join(key))
        if origin is not None and rest and not first.endswith(":"):  # a text over several lines
            yield f"{indent}# {origin}"
        elif origin is not None:
            first = f"{first}  # {origin}"
        yield from (f"{indent}{line}" for line in (first, *rest))
