"""The settings of runs, and where they differ from the defaults and from each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from isthmus.config.schema import RunConfig

_MOST_TEXT = 400


@dataclass(frozen=True, slots=True)
class SettingRow:
    name: str
    values: list[str]
    """One per run."""
    default: str
    changed: list[bool]
    """Whether the value of each run is not the default."""

    @property
    def differs(self) -> bool:
        """Whether two runs have different values."""
        return len(set(self.values)) > 1

    @property
    def is_default(self) -> bool:
        """Whether no run changes it."""
        return not any(self.changed)


def setting_rows(configs: Sequence[RunConfig]) -> list[SettingRow]:
    """All settings, ``section.key``."""
    flat = [_flat(config) for config in configs]
    rows = []
    for name in dict.fromkeys(name for settings in flat for name in settings):
        values = [_text(settings[name][0]) for settings in flat]
        default = _text(flat[0][name][1])
        rows.append(SettingRow(name, values, default, [value != default for value in values]))
    return rows


def _flat(config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """(value, default) of each setting."""
    values, settings = config.model_dump(mode="json"), dict[str, tuple[Any, Any]]()
    for name, field in type(config).model_fields.items():
        section = getattr(config, name)
        if not isinstance(section, BaseModel):
            settings[name] = values[name], field.get_default(call_default_factory=True)
            continue
        for key, inner in type(section).model_fields.items():
            settings[f"{name}.{key}"] = values[name][key], inner.get_default(call_default_factory=True)
    return settings


def _text(value: Any) -> str:
    if value is PydanticUndefined:  # a required setting has no default
        return ""
    return clipped(value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False), _MOST_TEXT)


def clipped(text: str, most: int) -> str:
    """At most so many characters, and the number of all."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"
