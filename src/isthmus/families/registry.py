"""Finds families: modules of ``models/`` that define ``FAMILY``, and files of ``isthmus convert --learn``."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families import models
from isthmus.families.discover.config_inference import check_known_settings
from isthmus.families.discover.json_family import load_family
from isthmus.families.family import Family

FAMILIES_ENV = "ISTHMUS_FAMILIES"
"""Environment variable: a folder of inferred families, ``<model_type>.json``."""


@cache
def all_families() -> dict[str, Family]:
    """All families by ``model_type``, in alphabetical order."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(models.__path__, f"{models.__name__}."):
        family = getattr(importlib.import_module(module.name), "FAMILY", None)
        if isinstance(family, Family):
            found[family.name] = family
    return dict(sorted(found.items()))


def family_for(hf_config: Mapping[str, Any], beside: Path | None = None) -> Family:
    """The family of a Hugging Face config.

    ``beside`` is the inferred family that a checkpoint was converted with; it has precedence.

    Raises:
        UsageError: no family has this ``model_type``, or the inferred family does not support the config.
        DataError: the file of the inferred family cannot be parsed, or is of another ``model_type``.
    """
    model_type = hf_config.get("model_type")
    name = model_type if isinstance(model_type, str) else ""
    if beside is None and name in all_families():
        return all_families()[name]
    path = beside or _user_file(name)
    if path is None:
        known = ", ".join(all_families())
        raise UsageError(
            f"config.json: no family has the model_type {model_type!r}. Families: {known}. "
            "isthmus convert --learn can infer the weight mapping of an unsupported model type."
        )
    family = load_family(path)
    if family.name != name:
        raise DataError(f"{path} is the family of {family.name}, but config.json has model_type {model_type!r}.")
    check_known_settings(family.data or {}, hf_config)
    return family


def _user_file(model_type: str) -> Path | None:
    folder = os.environ.get(FAMILIES_ENV)
    if not folder or not model_type.replace("-", "_").isidentifier():
        return None
    path = Path(folder, f"{model_type}.json")
    return path if path.is_file() else None
