"""Resolves data names: files, folders (all data files below them), glob patterns and datasets."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isthmus.data.readers.arrow_reader import METADATA, check_name, is_dataset
from isthmus.data.readers.data_names import (
    FORMATS,
    HUB,
    PARTIAL,
    hub_name,
    is_index_description,
    is_manifest,
    uncompressed_name,
)
from isthmus.errors import MissingInput, UsageError
from isthmus.files.folder_links import check_links
from isthmus.files.input_files import check_regular

_SUFFIXES = tuple(suffix for suffixes in FORMATS.values() for suffix in suffixes)


@dataclass(slots=True)
class DataFiles:
    names: list[str] = field(default_factory=list)
    """Each a file, the folder of a dataset, or ``hf:`` with the name of a dataset on the Hub."""
    ignored: list[str] = field(default_factory=list)
    """Files in the folders that are not data files by their names."""

    def notes(self) -> list[str]:
        if not self.ignored:
            return []
        some = first_names(self.ignored)
        return [f"{len(self.ignored)} files in the data folders are ignored, since their names are not of data: {some}"]


def first_names(names: Sequence[str]) -> str:
    """Up to three names, for a message."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def find_sources(names: Sequence[Path | str]) -> DataFiles:
    """The data of each name; UnsafeInput for a link out of a folder. A name may be a link itself."""
    if not names:
        raise UsageError("no data files given. Name at least one.")
    sources = DataFiles()
    for name in (hub_name(str(name)) for name in names):
        if name.startswith(HUB):
            check_name(name)
            sources.names.append(name)
        elif os.path.isdir(name):
            _find_below(Path(name), sources)
        elif os.path.exists(name):
            sources.names.append(name)
        elif glob.has_magic(name):
            _find_matches(name, sources)
        else:
            raise MissingInput(f"{name}: no such data file.")
    for name in sources.names:
        if not name.startswith(HUB):
            check_regular(name)
    return sources


def is_data_file(path: Path) -> bool:
    """Whether a file is data by its name, and neither a manifest, metadata of a dataset, nor a cache of Megatron-LM."""
    has_data_name = uncompressed_name(path).endswith(_SUFFIXES) and not path.name.startswith((".", "_"))
    return has_data_name and not (path.name in METADATA or is_manifest(path) or is_index_description(path))


def _find_matches(pattern: str, sources: DataFiles) -> None:
    matches = sorted(glob.glob(pattern, recursive=True))
    folders = [match for match in matches if os.path.isdir(match)]
    files = [match for match in matches if not os.path.isdir(match) and not is_index_description(Path(match))]
    if not files and not folders:
        raise MissingInput(f"{pattern}: no data file matches this pattern.")
    sources.names += files
    for folder in folders if not files else ():
        _find_below(Path(folder), sources)


def _find_below(folder: Path, sources: DataFiles) -> None:
    check_links(folder)
    names: list[str] = []
    for place, folders, files in os.walk(folder):
        if is_dataset(Path(place)):
            names.append(place)
            folders.clear()
            continue
        folders[:] = [name for name in folders if not (name.startswith(".") or name.endswith(PARTIAL))]
        for name in files:
            path = Path(place, name)
            (names if is_data_file(path) else sources.ignored).append(str(path))
    if not names:
        raise UsageError(
            f"{folder} is a folder with no data file in it. Expected files that end in {', '.join(_SUFFIXES)} "
            "(also .gz, .zst), or a data set made by save_to_disk."
        )
    sources.names += sorted(names)
    sources.ignored.sort()
