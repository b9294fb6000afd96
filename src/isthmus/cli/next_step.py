"""What ``isthmus`` alone prints: the commands to type next, from what this folder has."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from isthmus import __version__
from isthmus.config.recipes import RECIPE_SETTINGS


def next_steps(folder: Path) -> str:
    """The next commands, for a folder with data, a config, or runs."""
    rows = [*_rows(folder), ("isthmus --help", "all commands"), ("isthmus COMMAND --help", "options and examples")]
    width = max(len(command) for command, _ in rows)
    lines = [f"isthmus {__version__}: trains Hugging Face models on Megatron-Core", "", "Next:"]
    return "\n".join([*lines, *(f"  {command:<{width}}  {what}" for command, what in rows)])


def _rows(folder: Path) -> Iterator[tuple[str, str]]:
    config = folder / "run.yaml"
    if config.is_file():
        recipe = _recipe(config)
        yield f"isthmus {recipe} run.yaml", "start the run of run.yaml"
    if (run := _newest_run(folder)) is not None:
        name = shlex.quote(str(run.relative_to(folder)))
        if (run / "hf").is_dir():
            yield f"isthmus chat {name}", "talk to the model of the last run"
        else:
            recipe = _recipe(run / "config.yaml")
            yield f"isthmus {recipe} {name}/config.yaml --out {name}", "continue the last run, which stopped"
        yield f"isthmus report {name}", "its curves, data and settings as a page"
    if not config.is_file():
        yield "isthmus demo", "train and export a small model here, without network"
        yield "isthmus init", "look at your data and write the config of a first run"
    yield "isthmus doctor", "check what this machine can train"


def _recipe(config: Path) -> str:
    """The first line of a config by ``isthmus init`` that names its recipe; sft for other configs."""
    with config.open(errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name == "recipe" and (recipe := value.partition("#")[0].strip()) in RECIPE_SETTINGS:
                return recipe
    return "sft"


def _newest_run(folder: Path) -> Path | None:
    configs = [path for pattern in ("*/config.yaml", "runs/*/config.yaml") for path in folder.glob(pattern)]
    runs = [path.parent for path in configs if (path.parent / "hf").is_dir() or (path.parent / "checkpoints").is_dir()]
    return max(runs, key=lambda run: (run / "config.yaml").stat().st_mtime, default=None)
