"""Checksums of what a conversion wrote, taken while it was written: of each tensor, whatever file it went into."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash
from torch import Tensor

from isthmus.errors import DataError, UnsafeInput
from isthmus.hf.tensors.safetensors_format import byte_view

FILE = "checksums.json"
_ALGORITHM = "xxh3_64"


class Digests:
    """Sums of tensors whose rows come one chunk after the other; threads may share it, each with its own tensors."""

    def __init__(self) -> None:
        """Nothing was seen."""
        self._open: dict[str, xxhash.xxh3_64] = {}
        self._lock = threading.Lock()

    def update(self, canonical: str, chunk: Tensor) -> None:
        """Take the next rows of a tensor into account."""
        with self._lock:
            state = self._open.setdefault(canonical, xxhash.xxh3_64())
        state.update(byte_view(chunk.contiguous()))

    def found(self) -> dict[str, str]:
        """The sums, by canonical name."""
        return {name: state.hexdigest() for name, state in sorted(self._open.items())}


def write_manifest(folder: Path, tensors: Mapping[str, str], small_files: Iterable[Path]) -> None:
    """Keep the sums of tensors, and those of the files beside them, in the folder.

    Raises:
        OSError: the disk refuses; ``errors.disk_errors`` turns it into an error for the user.
    """
    files = {str(path.relative_to(folder)): file_digest(path) for path in sorted(small_files)}
    content = {"algorithm": _ALGORITHM, "files": files, "tensors": dict(tensors)}
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Mapping[str, str]:
    """The sums of the tensors; empty where the folder has none. The files beside them are checked at once.

    Raises:
        DataError: the manifest cannot be read, or a file is not the one that was written.
        UnsafeInput: it names a file outside of the folder.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        algorithm, files, tensors = content["algorithm"], dict(content["files"]), dict(content["tensors"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a list of checksums ({error}). Convert again, or remove it.") from None
    if algorithm != _ALGORITHM:
        raise DataError(f"{path} has sums of the kind {algorithm!r}, {_ALGORITHM} is read. Convert again.")
    for name, wanted in files.items():
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise UnsafeInput(f"{path} names {name!r}, which lies outside of the folder. Do not use this checkpoint.")
        found = file_digest(folder / name) if (folder / name).is_file() else "nothing"
        if found != wanted:
            raise DataError(f"{folder / name} was written with the checksum {wanted} and has {found}. Convert again.")
    return tensors


def file_digest(path: Path) -> str:
    """The sum of a small file."""
    return xxhash.xxh3_64_hexdigest(path.read_bytes())
