"""Finds the families: each module of this package that defines ``FAMILY`` is one; nothing has to be registered."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any

from isthmus import families
from isthmus.errors import UsageError
from isthmus.families.family import Family


@cache
def all_families() -> dict[str, Family]:
    """All families by ``model_type``, in alphabetical order."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(families.__path__, f"{families.__name__}."):
        family = getattr(importlib.import_module(module.name), "FAMILY", None)
        if isinstance(family, Family):
            found[family.name] = family
    return dict(sorted(found.items()))


def family_for(hf_config: Mapping[str, Any]) -> Family:
    """The family of a Hugging Face config.

    Raises:
        UsageError: the ``model_type`` is not among the known ones.
    """
    model_type = hf_config.get("model_type")
    family = all_families().get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(all_families())
        raise UsageError(f"config.json: model_type {model_type!r} is not a known family. Known are {known}.")
    return family
