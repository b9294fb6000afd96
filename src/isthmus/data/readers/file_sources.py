"""The names that a user gives for data, and what they stand for: files, folders, patterns, data sets.

A folder stands for every data file in it and below it, in the order of their paths; a pattern with ``*``, ``?`` or
``[...]`` for the files that match it.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isthmus.data.readers.decompress import unpacked_name
from isthmus.data.readers.hf_datasets import HUB, METADATA, check_name, is_data_set
from isthmus.data.store.manifest import PARTIAL, is_manifest
from isthmus.errors import MissingInput, UsageError

_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".tsv", ".txt")


@dataclass(slots=True)
class DataFiles:
    """What is to be read, in order."""

    names: list[str] = field(default_factory=list)
    """Each a file, the folder of a data set, or ``hf:`` with the name of one on the Hub."""
    passed_over: list[str] = field(default_factory=list)
    """Files in the folders that are no data by their names."""

    def notes(self) -> list[str]:
        """What was passed over, for people; empty when nothing was."""
        if not self.passed_over:
            return []
        some = ", ".join(self.passed_over[:3]) + (", ..." if len(self.passed_over) > 3 else "")
        return [
            f"{len(self.passed_over)} files in the data folders are no data by their names, and passed over: {some}"
        ]


def find_sources(names: Sequence[Path | str]) -> DataFiles:
    """Look up names.

    Raises:
        MissingInput: a file is not there, or no file matches a pattern.
        UsageError: there is no data file in a folder, or no sense in the name of a data set.
    """
    found = DataFiles()
    for name in map(str, names):
        if name.startswith(HUB):
            check_name(name)
            found.names.append(name)
        elif os.path.isdir(name):
            _look_into(Path(name), found)
        elif os.path.exists(name) or not glob.has_magic(name):
            if not os.path.exists(name):
                raise MissingInput(f"{name}: no such data file.")
            found.names.append(name)
        else:
            _match(name, found)
    return found


def is_data_file(path: Path) -> bool:
    """Whether a file found in a folder is data: by its name, unless it tells of a prepared pair or of a data set."""
    named = unpacked_name(path).endswith(_SUFFIXES) and not path.name.startswith((".", "_"))
    return named and path.name not in METADATA and not is_manifest(path)


def _match(pattern: str, found: DataFiles) -> None:
    matches = sorted(glob.glob(pattern, recursive=True))
    files = [match for match in matches if not os.path.isdir(match)]
    if not matches:
        raise MissingInput(f"{pattern}: no data file matches this pattern.")
    found.names += files
    for folder in matches if not files else ():
        _look_into(Path(folder), found)


def _look_into(folder: Path, found: DataFiles) -> None:
    before = len(found.names)
    names: list[str] = []
    for place, folders, files in os.walk(folder):
        if is_data_set(Path(place)):
            names.append(place)
            folders.clear()
            continue
        folders[:] = [name for name in folders if not (name.startswith(".") or name.endswith(PARTIAL))]
        for name in files:
            path = Path(place, name)
            (names if is_data_file(path) else found.passed_over).append(str(path))
    found.names += sorted(names)
    found.passed_over.sort()
    if len(found.names) == before:
        raise UsageError(
            f"{folder} is a folder with no data file in it. Wanted files that end in {', '.join(_SUFFIXES)} "
            "(also .gz, .zst), or a data set made by save_to_disk."
        )
