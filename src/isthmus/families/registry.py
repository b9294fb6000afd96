"""Finds families: those of ``models/``, those of programs and packages, and files of ``isthmus convert --learn``."""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import pkgutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from isthmus.errors import DataError, UsageError
from isthmus.families import models
from isthmus.families.family import Family
from isthmus.families.inferred.family_file import check_settings, load_family
from isthmus.families.models import wrappers

ENTRY_POINTS = "isthmus.families"
"""Group of entry points whose objects are families; unlike registered ones, all commands have them."""
FAMILIES_ENV = "ISTHMUS_FAMILIES"
"""Environment variable: a folder of inferred families, ``<model_type>.json``."""
_EMBEDDING = "embedding.word_embeddings.weight"


_REGISTERED: dict[str, Family] = {}


def all_families() -> dict[str, Family]:
    """All families by ``model_type``, in alphabetical order."""
    return dict(sorted((_installed() | _REGISTERED).items())) if _REGISTERED else _installed()


def register_family(family: Family, *, replace: bool = False) -> Family:
    """Make the weight mapping of a new architecture available in this process, for conversion and training.

    Call it before the model is opened, on every rank. A registered family has precedence over an inferred one.

    Args:
        family: the table, as in ``isthmus/families/models/*.py``; its ``name`` is the ``model_type`` of config.json.
        replace: replace an existing family of this ``model_type``.

    Returns:
        ``family``.

    Raises:
        UsageError: the ``model_type`` has a family and ``replace`` is false, or the table has no rule for the token
            embedding.
    """
    if family.name in all_families() and not replace:
        raise UsageError(
            f"the model_type {family.name!r} has a family already. Choose another name, or pass replace=True."
        )
    if all(rule.canonical != _EMBEDDING for rule in family.rules):
        raise UsageError(f"family {family.name!r} has no rule for {_EMBEDDING}. Add one, see isthmus.families.rules.")
    _REGISTERED[family.name] = family
    return family


class Shipped(NamedTuple):
    """A family of Isthmus."""

    family: Family
    about: str
    """What it is, in one line."""
    module: str
    """Where it is defined."""


@cache
def shipped_families() -> dict[str, Shipped]:
    """The families of Isthmus by ``model_type``: modules and folders of ``models/``, and the table of wrappers."""
    entries = [Shipped(family, about, wrappers.__name__) for about, family in wrappers.TABLE.items()]
    for info in pkgutil.walk_packages(models.__path__, f"{models.__name__}."):
        module = importlib.import_module(info.name)
        if isinstance(family := getattr(module, "FAMILY", None), Family):
            entries.append(Shipped(family, (module.__doc__ or "").partition("\n\n")[0], module.__name__))
    return {entry.family.name: entry for entry in entries}


@cache
def _installed() -> dict[str, Family]:
    """The families of Isthmus, and of packages with entry points in the group ``isthmus.families``."""
    families = {name: entry.family for name, entry in shipped_families().items()}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        family = entry.load()
        if not isinstance(family, Family) or family.name in families:
            what = f"has the model_type {family.name!r} twice" if isinstance(family, Family) else "is no Family"
            raise UsageError(f"the entry point {entry.value} of {ENTRY_POINTS} {what}. Correct or remove its package.")
        families[family.name] = family
    return dict(sorted(families.items()))


def family_for(hf_config: Mapping[str, Any], family_file: Path | None = None) -> Family:
    """The family of a Hugging Face config.

    ``beside`` is the inferred family that a checkpoint was converted with; it has precedence.

    Raises:
        UsageError: no family has this ``model_type``, it is multimodal around another language model than its family
            supports, or the inferred family does not support the config.
        DataError: the file of the inferred family cannot be parsed, or is of another ``model_type``.
    """
    model_type = hf_config.get("model_type")
    name = model_type if isinstance(model_type, str) else ""
    if family_file is None and name in all_families():
        family = all_families()[name]
        return family if family.nested is None else _variant(family, hf_config)
    path = family_file or _user_file(name)
    if path is None and hf_config.get("is_encoder_decoder"):
        raise UsageError(
            f"config.json: model_type {model_type!r} is an encoder-decoder model; only decoder-only models are "
            "supported. Use transformers for it, or choose a decoder-only model."
        )
    if path is None:
        near = ", ".join(difflib.get_close_matches(name, all_families(), n=3, cutoff=0.0))
        raise UsageError(
            f"config.json: no family has the model_type {model_type!r}. The nearest are {near}; "
            "docs/reference/families.md has all of them. isthmus convert --learn can infer the weight mapping of an "
            "unsupported model type."
        )
    family = load_family(path, all_families)
    if family.name != name:
        raise DataError(f"{path} is the family of {family.name}, but config.json has model_type {model_type!r}.")
    check_settings(family, hf_config)
    return family


def _variant(family: Family, hf_config: Mapping[str, Any]) -> Family:
    """The family of a multimodal class around the language model of this config."""
    wrappers = {
        variant.nested.model_type: variant for variant in (family, *family.variants) if variant.nested is not None
    }
    matching = next(
        (variant for variant in wrappers.values() if variant.nested and variant.nested.is_around(hf_config)), None
    )
    if matching is None:
        kind = hf_config["text_config"]["model_type"]
        raise UsageError(
            f"config.json: {family.name} around a language model of type {kind!r:.60} is not supported; around "
            f"{' and '.join(wrappers)} it is."
        )
    return matching


def language_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a multimodal model's language model; any other config as it is, also of an unknown type."""
    name = str(hf_config.get("model_type"))
    family = all_families().get(name)
    if family is None and _user_file(name) is not None:
        family = family_for(hf_config)
    if family is None or family.nested is None:
        return hf_config
    return family_for(hf_config).language_config(hf_config)


def _user_file(model_type: str) -> Path | None:
    folder = os.environ.get(FAMILIES_ENV)
    if not folder or not model_type.replace("-", "_").isidentifier():
        return None
    path = Path(folder, f"{model_type}.json")
    return path if path.is_file() else None
