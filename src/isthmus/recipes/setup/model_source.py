"""The model that a run starts from: a folder, the Hub, a preset, or ``model.config``."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.config.model_file import merge_config, read_model
from isthmus.config.presets import is_model_file
from isthmus.config.schema.model import ModelConfig
from isthmus.errors import MissingInput, UsageError
from isthmus.families.registry import family_for
from isthmus.families.rules.known_keys import IGNORED_KEYS, is_metadata, keys_read
from isthmus.hf.hub import fetch, looks_like_id
from isthmus.hf.model_folder import ModelFolder


def open_source(model: ModelConfig) -> ModelFolder:
    """Open ``model.path`` and merge ``model.config`` into its config.

    Raises:
        MissingInput, DataError: the model is missing or damaged.
        UsageError: the preset is unknown, or the model type does not use a key of ``model.config``.
        IOFailure: the Hub is not reachable.
    """
    if model.path is None:
        return _described("model.config", model.config)
    if is_model_file(model.path):
        found = _described(model.path, read_model(model.path))
    else:
        found = ModelFolder.open(local_folder(model.path, weights=model.init == "hf", code=model.trust_remote_code))
    if not model.config:
        return found
    merged = merge_config(found.config, model.config)
    _check_keys("model.config", model.config, keys_read(family_for(merged), merged), merged)
    return ModelFolder.from_config(found.path, merged)


def local_folder(named: str, *, weights: bool, code: bool = False) -> Path:
    """A local path, downloaded if ``named`` is a Hub id; ``code`` includes Python files."""
    path = Path(named)
    if path.exists():
        return path
    if not looks_like_id(named):
        raise MissingInput(
            f"{named} does not exist. Give a folder, an id on the Hub (org/name), or for a model preset:NAME."
        )
    return fetch(named, weights=weights, code=code, report=lambda line: print(line, file=sys.stderr, flush=True))


def _described(named: str, config: Mapping[str, Any]) -> ModelFolder:
    """A model given as a complete config, which may have keys that only transformers uses."""
    family = family_for(config)
    known = keys_read(family, config) | {*IGNORED_KEYS}
    if not family.auto_map and family.data is None:  # transformers has the class
        from isthmus.hf.random_model import effective_config  # a slow import

        known |= {*effective_config({"model_type": family.name})}
    _check_keys(named, config, known, config)
    return ModelFolder.from_config(named, config)


def _check_keys(where: str, keys: Mapping[str, Any], known: set[str], config: Mapping[str, Any]) -> None:
    """Refuse keys without effect: most are typing errors."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if key in keys and isinstance(rope, Mapping) and rope.get("factor", 1) != 1:
            if rope.get("rope_type", rope.get("type", "default")) == "default":
                raise UsageError(
                    f"{where}: {key}.factor={rope['factor']} has no effect without {key}.rope_type. Set that "
                    "too, for example to linear, or leave the factor out."
                )
    unknown = [key for key in keys if key not in known and not is_metadata(key)]
    if not unknown:
        return
    listed = []
    for key in unknown:
        near = difflib.get_close_matches(key, known, n=1)
        listed.append(key + (f" (did you mean {near[0]}?)" if near else ""))
    balance = " Load balancing is set under moe." if any("aux_loss" in key for key in unknown) else ""
    raise UsageError(
        f"{where}: a model of type {config['model_type']} does not use {', '.join(listed)}. Leave it out.{balance}"
    )
