"""Models as YAML: the keys of a ``config.json``, from a preset or a file of the user's, and keys laid over them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.config.load import settle
from isthmus.config.presets import config_path


def read_model(named: str) -> dict[str, Any]:
    """The keys of ``preset:NAME`` or of a YAML file, those of its bases included.

    Raises:
        MissingInput: there is no such file.
        UsageError: there is no such preset, or the file or one of its bases is not as a config file has to be.
        IOFailure: it cannot be read.
    """
    path: Path = config_path(named, "models")
    return settle(None, path, check=False, kind="models").given


def laid_over(config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with ``keys`` over it; an object such as ``rope_scaling`` key by key, a list as a whole."""
    merged = dict(config)
    for key, value in keys.items():
        below = merged.get(key)
        merged[key] = laid_over(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
