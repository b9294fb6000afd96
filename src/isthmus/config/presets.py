"""Shipped run configs and models, by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from isthmus.errors import UsageError

PREFIX = "preset:"
"""Prefix of a preset's name where a file is allowed too."""
Kind = Literal["train", "models", "bench"]
"""A run config, a model with the keys of its ``config.json``, or a table of configs for ``isthmus bench``."""
_FOLDER = Path(__file__).resolve().parents[1] / "presets"
_WORDS: dict[Kind, tuple[str, str]] = {
    "train": ("a run config", "Use it in place of a config file, or with `isthmus config cp`."),
    "models": ("a model", "Use it with --model or as model.path."),
    "bench": ("a table of run configs", "Use it with `isthmus bench`."),
}


def preset_names(kind: Kind = "train") -> list[str]:
    """Sorted; no name is of two kinds."""
    return sorted(path.stem for path in (_FOLDER / kind).glob("*.yaml"))


def config_path(source: str, kind: Kind = "train") -> Path:
    """The file of a path or of ``preset:NAME``."""
    if not source.startswith(PREFIX):
        return Path(source)
    name = source.removeprefix(PREFIX)
    if name not in preset_names(kind):
        if (other := kind_of(name)) != kind and name in preset_names(other):
            what, hint = _WORDS[other]
            raise UsageError(f"{source} is {what}, expected {_WORDS[kind][0]}. {hint}")
        near = difflib.get_close_matches(name, preset_names(kind), n=1)
        guess = f"Did you mean {PREFIX}{near[0]}? " if near else ""
        raise UsageError(f"there is no preset {name!r}. {guess}`isthmus config ls` lists them.")
    return _FOLDER / kind / f"{name}.yaml"


def is_model_file(source: str) -> bool:
    """Whether ``model.path`` is a YAML file or a preset, which have no weights."""
    return source.startswith(PREFIX) or source.lower().endswith((".yaml", ".yml"))


def kind_of(source: str) -> Kind:
    """``train`` for files and unknown names."""
    return next((kind for kind in _WORDS if source.removeprefix(PREFIX) in preset_names(kind)), "train")


def about(name: str, kind: Kind = "train") -> str:
    return next(opening_lines(config_path(f"{PREFIX}{name}", kind)), "")


def opening_lines(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return
        yield line.removeprefix("#").strip()
