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
from isthmus.families.registry import family_for
from isthmus.families.rules.known_keys import IGNORED_KEYS, is_metadata, keys_read
from isthmus.hf.hub_download import fetch, looks_like_id
from isthmus.hf.model_folder import ModelFolder


def open_source(model: ModelConfig) -> ModelFolder:
    """Open what ``model.path`` names, with ``model.config`` laid over its config.

    Raises:
        MissingInput, DataError: it is absent or damaged.
        UsageError: no such preset, or a key of ``model.config`` that a model of this kind does not have.
        IOFailure: the Hub cannot be reached.
    """
    if model.path is None:
        return _described("model.config", model.config)
    if is_model_file(model.path):
        found = _described(model.path, read_model(model.path))
    else:
        found = ModelFolder.open(local_folder(model.path, weights=model.init == "hf", code=model.trust_remote_code))
    if not model.config:
        return found
    merged = laid_over(found.config, model.config)
    _check_keys("model.config", model.config, keys_read(family_for(merged), merged), merged)
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
            f"{named} is not here. Give a folder, an id on the Hub (org/name), or for a model preset:NAME."
        )
    return fetch(named, weights=weights, code=code, say=lambda told: print(told, file=sys.stderr, flush=True))


def _described(named: str, config: Mapping[str, Any]) -> ModelFolder:
    """A whole model, which may have keys that only transformers has a use for, as a config.json does."""
    family = family_for(config)
    known = keys_read(family, config) | {*IGNORED_KEYS}
    if not family.auto_map and family.data is None:  # transformers has a class for it
        from isthmus.hf.shrunken_model import effective_config  # which imports much

        known |= {*effective_config({"model_type": family.name})}
    _check_keys(named, config, known, config)
    return ModelFolder.described(named, config)


def _check_keys(where: str, keys: Mapping[str, Any], known: set[str], config: Mapping[str, Any]) -> None:
    """Refuse keys that would change nothing: most are slips."""
    for key in ("rope_scaling", "rope_parameters"):
        said = config.get(key)
        if key in keys and isinstance(said, Mapping) and said.get("factor", 1) != 1:
            if said.get("rope_type", said.get("type", "default")) == "default":
                raise UsageError(
                    f"{where}: {key}.factor={said['factor']} changes nothing without its kind. Give {key}.rope_type "
                    "too, such as linear, or leave it out."
                )
    strange = [key for key in keys if key not in known and not is_metadata(key)]
    if not strange:
        return
    said = []
    for key in strange:
        near = difflib.get_close_matches(key, known, n=1)
        said.append(key + (f" (did you mean {near[0]}?)" if near else ""))
    balance = " What balances experts is set under moe." if any("aux_loss" in key for key in strange) else ""
    raise UsageError(
        f"{where}: a model of type {config['model_type']} is not changed by {', '.join(said)}. Leave it out.{balance}"
    )
