"""The data sources of a run: training sets, and validation and test files."""

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
    """One dataset: either raw files, or indexed files from ``isthmus prepare`` or Megatron."""

    use: Use
    name: str
    """In messages: data, the name of a set, validation, or test."""
    key: str
    """Prefix of its files in the run folder."""
    files: tuple[str, ...]
    """Raw files as given; indexed files as prefixes."""
    prepared: bool
    weight: float = 1.0


def find_data_sources(config: RunConfig) -> list[DataSource]:
    data = config.data
    sources = [
        _source("train", name, f"set-{k}", one.files, one.weight) for k, (name, one) in enumerate(data.sets.items())
    ]
    rest: list[tuple[Use, str, Sequence[str]]] = [
        ("train", "data", data.files),
        ("valid", "validation", data.valid_files),
        ("test", "test", data.test_files),
    ]
    sources += [_source(use, name, use, files) for use, name, files in rest if files]
    if data.columns and sources and all(source.prepared for source in sources):
        raise UsageError("data.columns names fields of records, and prepared files have no fields. Omit it.")
    return sources


def _source(use: Use, name: str, key: str, files: Sequence[str], weight: float = 1.0) -> DataSource:
    names = [expanded for file in files for expanded in _expand(file)]
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


def _expand(name: str) -> list[str]:
    """The files of a pattern or of a folder with indexed files; else the name."""
    if not os.path.exists(name) and glob.has_magic(name):
        matches = [file for file in sorted(glob.glob(name, recursive=True)) if not _is_partial(Path(file))]
        indexed = [match for match in matches if match.endswith((".idx", ".bin"))]
        raw = [match for match in matches if is_data_file(Path(match))] if indexed else []
        return indexed + raw or [name]
    below = sorted(Path(name).rglob("*.idx")) if os.path.isdir(name) else []
    indexed = [str(path) for path in below if not _is_partial(path)]
    if not indexed:
        return [name]
    raw = []
    with contextlib.suppress(UsageError):  # no raw files
        raw = find_sources([name]).names
    return indexed + raw


def _is_partial(path: Path) -> bool:
    return path.parent.name.endswith(PARTIAL)
