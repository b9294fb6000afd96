"""The parts that a run's data is made of: what is learned from, one set or several, and what is held out in files."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isthmus.config.schema import RunConfig
from isthmus.data.readers.file_sources import find_sources, is_data_file
from isthmus.data.store.indexed_dataset import find_prefix
from isthmus.data.store.manifest import PARTIAL
from isthmus.errors import MissingInput, UsageError

Use = Literal["train", "valid", "test"]


@dataclass(frozen=True, slots=True)
class DataSource:
    """Files that are one set of data: either raw ones, or pairs that ``isthmus prepare`` or Megatron made."""

    use: Use
    name: str
    """In messages: data, the name of a set, held out, or test."""
    key: str
    """Of what the run folder has of it."""
    files: tuple[str, ...]
    """Of raw files the names as given, of pairs their prefixes."""
    prepared: bool
    weight: float = 1.0


def find_data_sources(config: RunConfig) -> list[DataSource]:
    """Look up the data files of a run.

    Raises:
        MissingInput: one is not there.
        UsageError: raw files and prepared ones are named together in one set, or a setting is of raw ones alone.
    """
    data = config.data
    parts = [_part("train", name, f"set-{k}", one.files, one.weight) for k, (name, one) in enumerate(data.sets.items())]
    rest: list[tuple[Use, str, Sequence[str]]] = [
        ("train", "data", data.files),
        ("valid", "held out", data.valid_files),
        ("test", "test", data.test_files),
    ]
    parts += [_part(use, name, use, files) for use, name, files in rest if files]
    if data.columns and parts and all(part.prepared for part in parts):
        raise UsageError("data.columns names fields of records, and prepared files have none. Leave it out.")
    return parts


def _part(use: Use, name: str, key: str, files: Sequence[str], weight: float = 1.0) -> DataSource:
    names = [expanded for file in files for expanded in _expanded(file)]
    prefixes = [find_prefix(file) for file in names]
    if not any(prefixes):
        find_sources(names)
        return DataSource(use, name, key, tuple(names), False, weight)
    raw = [file for file, prefix in zip(names, prefixes, strict=True) if prefix is None]
    if raw:
        if not os.path.exists(raw[0]):
            raise MissingInput(f"{raw[0]}: no such data file, and no {raw[0]}.bin with {raw[0]}.idx.")
        raise UsageError(
            f"{name}: {raw[0]} is a raw file, and {next(filter(None, prefixes))} is prepared. Prepare both, or name "
            "them as two sets under data.sets."
        )
    return DataSource(use, name, key, tuple(dict.fromkeys(str(prefix) for prefix in prefixes)), True, weight)


def _expanded(name: str) -> list[str]:
    """The files that a pattern or a folder with pairs means; any other name as it is."""
    if not os.path.exists(name) and glob.has_magic(name):
        matches = [file for file in sorted(glob.glob(name, recursive=True)) if not _is_unfinished(Path(file))]
        pairs = [match for match in matches if match.endswith((".idx", ".bin"))]
        raw = [match for match in matches if is_data_file(Path(match))] if pairs else []
        return pairs + raw or [name]
    below = sorted(Path(name).rglob("*.idx")) if os.path.isdir(name) else []
    pairs = [str(path) for path in below if not _is_unfinished(path)]
    if not pairs:
        return [name]
    raw = []
    with contextlib.suppress(UsageError):  # there are no others
        raw = find_sources([name]).names
    return pairs + raw


def _is_unfinished(path: Path) -> bool:
    return path.parent.name.endswith(PARTIAL)
