"""Finds and reads Primus' YAML files, with their bases and variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.config.inherit import Setting, read_settings
from isthmus.errors import UsageError

CHECKOUT = "PRIMUS_PATH"
"""Environment variable: a checkout of Primus."""


@dataclass(frozen=True, slots=True)
class PrimusFile:
    path: Path
    values: dict[str, Any]


def read_file(path: Path) -> PrimusFile:
    """Read a file with its bases (``bases``, ``extends``, ``includes``) and variables."""
    errors: list[str] = []
    values: dict[str, Any] = {}
    for setting in _settings(path, errors, ()):
        place = values
        for part in setting.key[:-1]:
            inner = place.get(part)
            if not isinstance(inner, dict):
                inner = place[part] = {}
            place = inner
        last = setting.key[-1]
        if setting.value != {} or not isinstance(place.get(last), dict):
            place[last] = setting.value
    if errors:
        raise UsageError("\n  ".join(errors))
    return PrimusFile(path, values)


def _settings(path: Path, errors: list[str], within: tuple[Path, ...]) -> Iterator[Setting]:
    if path in within:
        raise UsageError(f"{path} includes itself ({' -> '.join(map(str, within))}). Remove one of the includes.")
    settings = list(read_settings(path, errors.append))
    for setting in settings:
        if setting.key == ("includes",):
            listed = [setting.value] if isinstance(setting.value, str) else setting.value or []
            if not isinstance(listed, list):
                raise UsageError(f"{setting.origin}  includes  must be a list of files, got {listed!r}.")
            for name in listed:
                folder = Path(setting.origin.rsplit(":", 2)[0]).parent
                yield from _settings(folder / str(name), errors, (*within, path))
    yield from (setting for setting in settings if setting.key != ("includes",))


def find_file(name: str, kind: str, experiment: Path, folder: Path | None) -> Path | None:
    """Find the file ``name`` of a model or a module (``kind``: ``models`` or ``modules``).

    The search order is: beside the experiment, ``folder``, the checkout that contains the experiment, ``PRIMUS_PATH``.
    """
    places = [experiment.parent]
    checkout = os.environ.get(CHECKOUT)
    for root, option in ((folder, "--models"), (Path(checkout) if checkout else None, CHECKOUT)):
        if root is not None and not root.is_dir():
            raise UsageError(f"{option} {root}: there is no such folder.")
    if folder is not None:
        places.append(folder)
    roots = [*experiment.resolve().parents, *([Path(checkout)] if checkout else [])]
    places += [root / "primus" / "configs" / kind / "megatron" for root in roots]
    return next((place / name for place in places if os.path.isfile(place / name)), None)  # False for any name
