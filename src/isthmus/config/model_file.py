"""Models as YAML: the keys of a ``config.json``, from a preset or a file, and overrides of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.config.load import load_settings
from isthmus.config.presets import config_path


def read_model(source: str) -> dict[str, Any]:
    """The keys of ``preset:NAME`` or of a YAML file, merged with those of its bases."""
    path: Path = config_path(source, "models")
    return load_settings(None, path, check=False, kind="models").values


def merge_config(config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Replace keys; an object such as ``rope_scaling`` is merged, a list is replaced."""
    merged = dict(config)
    for key, value in keys.items():
        below = merged.get(key)
        merged[key] = merge_config(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
