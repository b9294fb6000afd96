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
    PARTIAL,
    hub_name,
    is_hub_name,
    is_index_description,
    is_manifest,
    uncompressed_name,
)
from isthmus.errors import MissingInput, UsageError
from isthmus.files.folder_links import check_links
from isthmus.files.input_files import check_regular
from isthmus.files.remote_files import file_system, is_url, remote_errors

_SUFFIXES = tuple(suffix for suffixes in FORMATS.values() for suffix in suffixes)


@dataclass(slots=True)
class DataFiles:
    names: list[str] = field(default_factory=list)
    """Each a file, a URL of one, the folder of a dataset, or ``hf:`` with the name of a dataset on the Hub."""
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
        if is_hub_name(name):
            check_name(name)
            sources.names.append(name)
        elif is_url(name):
            _find_remote(name, sources)
        elif os.path.isdir(name):
            _find_below(Path(name), sources)
        elif os.path.exists(name):
            sources.names.append(name)
        elif glob.has_magic(name):
            _find_matches(name, sources)
        else:
            raise MissingInput(f"{name}: no such data file.")
    for name in sources.names:
        if not (is_hub_name(name) or is_url(name)):
            check_regular(name)
    return sources


def is_data_file(path: Path) -> bool:
    """Whether a file is data by its name, and neither a manifest, metadata of a dataset, nor a cache of Megatron-LM."""
    return has_data_name(path) and not (is_manifest(path) or is_index_description(path))


def has_data_name(path: Path) -> bool:
    """Whether the suffix is that of a data format, and the name neither hidden nor that of metadata."""
    is_data = uncompressed_name(path).endswith(_SUFFIXES) and not path.name.startswith((".", "_"))
    return is_data and path.name not in METADATA


def _find_matches(pattern: str, sources: DataFiles) -> None:
    matches = sorted(glob.glob(pattern, recursive=True))
    folders = [match for match in matches if os.path.isdir(match)]
    files = [match for match in matches if not os.path.isdir(match) and not is_index_description(Path(match))]
    if not files and not folders:
        raise MissingInput(f"{pattern}: no data file matches this pattern.")
    sources.names += files
    for folder in folders if not files else ():
        _find_below(Path(folder), sources)


def _find_remote(url: str, sources: DataFiles) -> None:
    """A file at a URL, the data files of a folder, or the matches of a pattern."""
    system, path = file_system(url)
    with remote_errors(url):
        if glob.has_magic(path):
            matches = sorted(system.glob(path))
        elif system.isdir(path):
            matches = sorted(system.find(path))
            indices = {match.removesuffix(".idx") for match in matches if match.endswith(".idx")}
            hidden = [match for match in matches if PARTIAL in match or match.removesuffix(".json") in indices]
            matches = [match for match in matches if match not in hidden and has_data_name(Path(match))]
        else:
            matches = [path] if system.exists(path) else []
    if not matches:
        raise MissingInput(
            f"{url}: no such data file. Prepared files (.bin, .idx) are mapped into memory: copy them to a disk."
        )
    sources.names += [system.unstrip_protocol(match) for match in matches]


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
