"""Files that come with Isthmus, by name: configs of runs, and models."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from isthmus.errors import UsageError

PREFIX = "preset:"
"""What a name begins with where a file could be meant too."""
Kind = Literal["train", "models"]
"""The config of a run, or a model: the keys of its ``config.json``."""
_FOLDER = Path(__file__).resolve().parents[1] / "presets"
_WORDS: dict[Kind, tuple[str, str]] = {
    "train": ("the config of a run", "Give it where a config file is wanted, or to `isthmus config cp`."),
    "models": ("a model", "Give it with --model, or as model.path."),
}


def preset_names(kind: Kind = "train") -> list[str]:
    """All of a kind, in the order of the alphabet; no name is of both kinds."""
    return sorted(path.stem for path in (_FOLDER / kind).glob("*.yaml"))


def config_path(named: str, kind: Kind = "train") -> Path:
    """The file that is meant by a path or by ``preset:NAME``.

    Raises:
        UsageError: there is no such preset, or it is of the other kind.
    """
    if not named.startswith(PREFIX):
        return Path(named)
    name = named.removeprefix(PREFIX)
    if name not in preset_names(kind):
        other: Kind = "train" if kind == "models" else "models"
        if name in preset_names(other):
            what, mend = _WORDS[other]
            raise UsageError(f"{named} is {what}, and {_WORDS[kind][0]} is wanted here. {mend}")
        near = difflib.get_close_matches(name, preset_names(kind), n=1)
        guess = f"Did you mean {PREFIX}{near[0]}? " if near else ""
        raise UsageError(f"there is no preset {name!r}. {guess}`isthmus config ls` lists them.")
    return _FOLDER / kind / f"{name}.yaml"


def is_model_file(named: str) -> bool:
    """Whether ``model.path`` names YAML, which brings no weights, and not a folder or a repository."""
    return named.startswith(PREFIX) or named.lower().endswith((".yaml", ".yml"))


def kind_of(named: str) -> Kind:
    """Of which kind a preset is; of one that is not there, and of a file, the config of a run."""
    return "models" if named.removeprefix(PREFIX) in preset_names("models") else "train"


def about(name: str, kind: Kind = "train") -> str:
    """The first line of a preset's opening comment."""
    return next(opening_lines(config_path(f"{PREFIX}{name}", kind)), "")


def opening_lines(path: Path) -> Iterator[str]:
    """The comment that a file opens with, line by line."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return
        yield line.removeprefix("#").strip()
