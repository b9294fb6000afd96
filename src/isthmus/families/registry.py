"""Finds the families: each module of this package that defines ``FAMILY`` is one; nothing has to be registered.

Learned ones (``isthmus convert --learn``) are files of data, beside a checkpoint or in a folder of the user's.
"""

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
from isthmus.families.discover.config_inference import refuse_unseen
from isthmus.families.discover.json_family import load_family
from isthmus.families.family import Family

KEPT = "ISTHMUS_FAMILIES"
"""The environment's name for a folder of learned families, ``<model_type>.json`` each."""


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

    Args:
        hf_config: the config.
        beside: a learned family that a checkpoint was converted with, which goes before all others.

    Raises:
        UsageError: the ``model_type`` is not among the known ones, or a learned family knows of no such model.
        DataError: the file of a learned family cannot be understood, or is another's.
    """
    model_type = hf_config.get("model_type")
    name = model_type if isinstance(model_type, str) else ""
    if beside is None and name in all_families():
        return all_families()[name]
    path = beside or _kept(name)
    if path is None:
        known = ", ".join(all_families())
        raise UsageError(
            f"config.json: model_type {model_type!r} is not a known family. Known are {known}. "
            "For another, isthmus convert --learn tries to find out how its tensors lie."
        )
    family = load_family(path)
    if family.name != name:
        raise DataError(f"{path} is the family of {family.name}, and config.json says {model_type!r}.")
    refuse_unseen(family.data or {}, hf_config)
    return family


def _kept(model_type: str) -> Path | None:
    """The user's file for a model type, if there is one."""
    folder = os.environ.get(KEPT)
    if not folder or not model_type.replace("-", "_").isidentifier():
        return None
    path = Path(folder, f"{model_type}.json")
    return path if path.is_file() else None
