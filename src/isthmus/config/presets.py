"""Config files that come with Isthmus, by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from isthmus.errors import UsageError

PREFIX = "preset:"
"""What a name begins with where a file could be meant too."""
_FOLDER = Path(__file__).resolve().parents[1] / "presets" / "train"


def preset_names() -> list[str]:
    """All of them, in the order of the alphabet."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def config_path(named: str) -> Path:
    """The file that is meant by a path or by ``preset:NAME``.

    Raises:
        UsageError: there is no such preset.
    """
    if not named.startswith(PREFIX):
        return Path(named)
    name = named.removeprefix(PREFIX)
    if name not in preset_names():
        near = difflib.get_close_matches(name, preset_names(), n=1)
        guess = f"Did you mean {PREFIX}{near[0]}? " if near else ""
        raise UsageError(f"there is no preset {name!r}. {guess}`isthmus config ls` lists them.")
    return _FOLDER / f"{name}.yaml"


def about(name: str) -> str:
    """The first line of a preset's opening comment."""
    return next(opening_lines(config_path(f"{PREFIX}{name}")), "")


def opening_lines(path: Path) -> Iterator[str]:
    """The comment that a file opens with, line by line."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return
        yield line.removeprefix("#").strip()
