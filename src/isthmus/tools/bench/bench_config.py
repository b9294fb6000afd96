"""The config of a cell: the user's, with mock data, few steps, and nothing that is not part of a step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.config.load import load_config, load_settings
from isthmus.config.recipes import RECIPE_SETTINGS
from isthmus.config.schema import RunConfig
from isthmus.config.yaml_text import write_mapping
from isthmus.errors import UsageError
from isthmus.tools.bench.bench_grid import BenchCell
from isthmus.tools.bench.step_clock import STEP_CLOCK

_REPLACED: Mapping[str, Any] = {
    **dict.fromkeys(
        f"data.{name}"
        for name in ("files", "sets", "columns", "valid_files", "test_files", "loss_on", "overlong", "on_error")
    ),
    **dict.fromkeys(f"train.{name}" for name in ("epochs", "eval_every", "early_stopping", "profile")),
    **dict.fromkeys(
        f"optim.{name}"
        for name in ("warmup_steps", "warmup_fraction", "schedule_steps", "decay_steps", "power", "num_cycles")
    ),
    "chat": None,
    "eval": None,
    "data.mock": True,
    "data.valid_fraction": 0.0,
    "data.test_fraction": 0.0,
    "optim.schedule": "constant",
    "checkpoint": {"save_final": False, "export_final": False},
    "logging": {"to": []},
    "callbacks": [STEP_CLOCK],
}
"""Settings that are no part of a step, or that do not fit a run of few steps on mock data."""


def check_settings(settings: Sequence[str]) -> None:
    """Raise UsageError for a setting that would have no effect."""
    for setting in settings:
        name = setting.partition("=")[0]
        if name == "out":
            raise UsageError(f"the folder of the results is an option. Use --out instead of {setting}.")
        if name == "train.steps":
            raise UsageError("the steps of a cell are --warmup and --steps. Use these instead of train.steps.")
        if name in _REPLACED or name.partition(".")[0] in _REPLACED:
            raise UsageError(
                f"{name} has no effect on the time of a step: isthmus bench trains on mock data, without evaluations, "
                "checkpoints and trackers. Leave it out."
            )


def cell_config(cell: BenchCell, *, recipe: str | None, model: str | None, steps: int, out: Path) -> RunConfig:
    """The config of the run that measures a cell; raises UsageError as :func:`load_config`."""
    flags = {"model": model, "out": out}
    settings = load_settings(recipe, cell.file, cell.settings, check=False).values
    name = recipe or settings.get("recipe")
    if name in {recipe_name for recipe_name, rules in RECIPE_SETTINGS.items() if rules.answers is not None}:
        raise UsageError(
            f"isthmus bench trains on mock data, which has single texts, and the recipe is {name}. Measure the model "
            "and layout with recipe sft."
        )
    return load_config(recipe, cell.file, cell.settings, flags, replaced={**_REPLACED, "train.steps": steps})


def pasteable_yaml(cell: BenchCell, *, recipe: str | None, model: str | None) -> str:
    """The settings that the user gave for a cell, with those of its file, as a config file."""
    settings = load_settings(recipe, cell.file, cell.settings, {"model": model}, check=False).values
    return write_mapping({"recipe": recipe, **settings} if recipe else settings)


def fingerprint(config: RunConfig, *, nproc: int, warmup: int) -> str:
    """Identifies the settings of a cell, wherever its files are."""
    settings = config.model_dump(mode="json") | {"out": None, "nproc": nproc, "warmup": warmup}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
