"""Checksums of the tensors and small files of a converted model (``checksums.json``)."""

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


class TensorChecksums:
    """Rows of a tensor must arrive in order; different tensors may be updated by different threads."""

    def __init__(self) -> None:
        self._states: dict[str, xxhash.xxh3_64] = {}
        self._lock = threading.Lock()

    def update(self, canonical: str, chunk: Tensor) -> None:
        with self._lock:
            state = self._states.setdefault(canonical, xxhash.xxh3_64())
        state.update(byte_view(chunk.contiguous()))

    def result(self) -> dict[str, str]:
        """By canonical name."""
        return {name: state.hexdigest() for name, state in sorted(self._states.items())}


def write_checksums(folder: Path, tensors: Mapping[str, str], small_files: Iterable[Path]) -> None:
    files = {str(path.relative_to(folder)): _file_checksum(path) for path in sorted(small_files)}
    content = {"algorithm": _ALGORITHM, "files": files, "tensors": dict(tensors)}
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_checksums(folder: Path) -> Mapping[str, str]:
    """Check the small files, and return the checksums of the tensors; empty without ``checksums.json``.

    A DataError if a small file has changed.
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
        raise DataError(f"{path} has checksums of type {algorithm!r}; {_ALGORITHM} is supported. Convert again.")
    for name, expected in files.items():
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise UnsafeInput(f"{path} names {name!r}, outside of the folder. Do not use this checkpoint.")
        found = _file_checksum(folder / name) if (folder / name).is_file() else "nothing"
        if found != expected:
            raise DataError(f"{folder / name} was written with the checksum {expected} and has {found}. Convert again.")
    return tensors


def _file_checksum(path: Path) -> str:
    return xxhash.xxh3_64_hexdigest(path.read_bytes())
