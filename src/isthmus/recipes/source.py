"""The model that a run starts from, wherever it is said to be: a folder, the Hub, a preset, or the config itself."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.config.model_file import laid_over, read_model
from isthmus.config.presets import is_model_file
from isthmus.config.schema.model import ModelConfig
from isthmus.errors import MissingInput, UsageError
from isthmus.families.reads import is_about_else, keys_read
from isthmus.families.registry import all_families, family_for
from isthmus.hf.fetch import fetch, looks_like_id
from isthmus.hf.folder import ModelFolder


def open_source(model: ModelConfig) -> ModelFolder:
    """Open what ``model.path`` names, with ``model.config`` laid over its config.

    Raises:
        MissingInput, DataError: it is absent or damaged.
        UsageError: no such preset, or a key of ``model.config`` that a model of this kind does not have.
        IOFailure: the Hub cannot be reached.
    """
    if model.path is None:
        found = ModelFolder.described("model.config", model.config)
    elif is_model_file(model.path):
        found = ModelFolder.described(model.path, read_model(model.path))
    else:
        found = ModelFolder.open(local_folder(model.path, weights=model.init == "hf", code=model.trust_remote_code))
    if not model.config:
        return found
    merged = laid_over(found.config, model.config)
    _check_keys(model, merged)
    return ModelFolder.described(found.path, merged)


def local_folder(named: str, *, weights: bool, code: bool = False) -> Path:
    """A folder or file on this machine, fetched from the Hub if it is named by its id.

    Args:
        named: a path, or ``org/name``.
        weights: whether a model's weights are wanted.
        code: whether its Python files are.

    Raises:
        MissingInput: it is neither here nor on the Hub; with both reasons.
        IOFailure: the Hub cannot be reached.
    """
    path = Path(named)
    if path.exists():
        return path
    if not looks_like_id(named):
        raise MissingInput(
            f"{named} is not here. Give the folder of a Hugging Face model, an id on the Hub (org/name) or preset:NAME."
        )
    return fetch(named, weights=weights, code=code, say=lambda told: print(told, file=sys.stderr, flush=True))


def _check_keys(model: ModelConfig, merged: Mapping[str, Any]) -> None:
    """Refuse keys of ``model.config`` that would change nothing: most are slips.

    A whole model may bring keys that only transformers has a use for, as a config.json does.
    """
    family = family_for(merged)
    known = keys_read(family, merged)
    also = known if model.path is not None else known | _of_transformers(family.name)
    strange = [key for key in model.config if key not in also and not is_about_else(key)]
    if not strange:
        return
    said = []
    for key in strange:
        near = difflib.get_close_matches(key, known, n=1)
        said.append(f"model.config.{key}" + (f" (did you mean {near[0]}?)" if near else ""))
    raise UsageError(f"{', '.join(said)}: a model of type {family.name} is not changed by it. Leave it out.")


def _of_transformers(model_type: str) -> set[str]:
    from isthmus.hf.shrunken import effective_config

    own = all_families()[model_type].auto_map if model_type in all_families() else {}
    return set() if own else set(effective_config({"model_type": model_type}))
