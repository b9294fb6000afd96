"""Where Primus' files are, and what they say with all that they build on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.config.inherit import Setting, read_settings
from isthmus.errors import UsageError

CHECKOUT = "PRIMUS_PATH"
"""The environment's name for a checkout of Primus."""


@dataclass(frozen=True, slots=True)
class Read:
    """A file's keys."""

    path: Path
    values: dict[str, Any]


def read_file(path: Path) -> Read:
    """A file with its bases (``bases``, ``extends``, ``includes``) and variables.

    Raises:
        MissingInput: it is not there.
        UsageError: it is not YAML, or a base or a variable is missing; all that is wrong.
        IOFailure: it cannot be read.
    """
    complaints: list[str] = []
    values: dict[str, Any] = {}
    for setting in _settings(path, complaints, ()):
        place = values
        for part in setting.key[:-1]:
            inner = place.get(part)
            if not isinstance(inner, dict):
                inner = place[part] = {}
            place = inner
        last = setting.key[-1]
        if setting.value != {} or not isinstance(place.get(last), dict):
            place[last] = setting.value
    if complaints:
        raise UsageError("\n  ".join(complaints))
    return Read(path, values)


def _settings(path: Path, complaints: list[str], within: tuple[Path, ...]) -> Iterator[Setting]:
    if path in within:
        raise UsageError(f"{path} includes itself ({' -> '.join(map(str, within))}). Take one of the files out.")
    found = list(read_settings(path, complaints.append))
    for setting in found:
        if setting.key == ("includes",):
            listed = [setting.value] if isinstance(setting.value, str) else setting.value
            for name in listed or ():
                folder = Path(setting.origin.rsplit(":", 2)[0]).parent
                yield from _settings(folder / str(name), complaints, (*within, path))
    yield from (setting for setting in found if setting.key != ("includes",))


def find_file(name: str, kind: str, experiment: Path, folder: Path | None) -> Path | None:
    """The file of a model or a module, if there is one.

    It is looked for beside the experiment, in ``folder``, in the checkout that the experiment lies in, and in that of
    ``PRIMUS_PATH``.

    Args:
        name: as the experiment names it.
        kind: ``models`` or ``modules``.
        experiment: the file that names it.
        folder: what the user says.

    Raises:
        UsageError: ``folder`` or ``PRIMUS_PATH`` is no folder.
    """
    places = [experiment.parent]
    checkout = os.environ.get(CHECKOUT)
    for told, by in ((folder, "--models"), (Path(checkout) if checkout else None, CHECKOUT)):
        if told is not None and not told.is_dir():
            raise UsageError(f"{by} {told}: there is no such folder.")
    if folder is not None:
        places.append(folder)
    roots = [*experiment.resolve().parents, *([Path(checkout)] if checkout else [])]
    places += [root / "primus" / "configs" / kind / "megatron" for root in roots]
    return next((place / name for place in places if (place / name).is_file()), None)
