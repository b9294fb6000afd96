"""Opens input files within bounds: regular files only, JSON of limited size and depth.

``open`` of a named pipe without a writer waits for ever, and a device has no end. docs/reference/exit-codes.md lists
all bounds.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

from isthmus.errors import DataError, IOFailure, MissingInput, UsageError

JSON_BYTES = 64 << 20
"""Largest JSON file that is read as a whole: the index of a model of 500,000 tensors has about 50 MiB."""
MAX_DEPTH = 64
"""Most levels of nested objects and arrays, or of nested YAML."""
_MAX_CONTAINERS = 1_000_000
DIGITS = 20
"""Most of an integer in JSON, without a reason for more."""
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (DIGITS + 1))
"""No float has the value of a larger integer."""
_KINDS: Mapping[Callable[[int], bool], str] = {
    stat.S_ISFIFO: "a pipe",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
}


def check_regular(path: Path | str) -> None:
    """Raise DataError for a pipe, a device or a socket, and OSError for a file that does not exist."""
    mode = Path(path).stat().st_mode
    for is_kind, name in _KINDS.items():
        if is_kind(mode):
            raise DataError(f"{path} is {name}, expected a file. Write its content into a file, and give that.")


def read_bytes(path: Path, most_bytes: int = JSON_BYTES) -> bytes:
    """The content of a file; DataError if it has more than ``most_bytes`` or is not a regular file."""
    check_regular(path)
    with path.open("rb") as file:
        raw = file.read(most_bytes + 1)
    if len(raw) > most_bytes:
        raise DataError(f"{path} has more than {most_bytes / 2**20:g} MiB. Is it the right file?")
    return raw


def read_text(path: Path, most_bytes: int = JSON_BYTES, *, missing: str = "", what: str = "UTF-8 text") -> str:
    """The content of a file of the user in UTF-8.

    Raises:
        MissingInput: there is no such file; ``missing`` is what to do, instead of checking the path.
        UsageError: it is not ``what``.
        DataError: it has more than ``most_bytes`` or is not a regular file.
        IOFailure: it cannot be read.
    """
    try:
        return read_bytes(path, most_bytes).decode("utf-8")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise MissingInput(f"{path}: there is no such {missing or 'file. Check the path.'}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not {what} (byte {error.start}).") from error
    except OSError as error:
        raise IOFailure(f"{path} cannot be read: {error.strerror}.") from error


def check_uncompressed(path: Path) -> None:
    """Raise ValueError for arrays of NumPy (``.npz``) that expand in memory: ``numpy.savez`` compresses nothing."""
    with ZipFile(path) as archive:
        members = archive.infolist()
    if any(member.compress_type != ZIP_STORED for member in members):
        raise ValueError("its arrays are compressed")
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise ValueError("its arrays are larger than the file")


def read_json(path: Path, most_bytes: int = JSON_BYTES, *, most_digits: int = DIGITS) -> Any:
    """The value in a JSON file.

    Raises:
        DataError: it is not JSON in UTF-8, or larger or deeper nested than the bounds.
        OSError: it cannot be read.
    """
    try:
        raw = read_bytes(path, most_bytes)
        return parse_json(raw, **({"parse_int": partial(_short_int, most_digits)} if _LONG_NUMBER.search(raw) else {}))
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}.") from None


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """The value of JSON text, of at most ``MAX_DEPTH`` levels; ValueError if it is not.

    ``hooks`` are those of ``json.loads``.
    """
    text = text.decode() if isinstance(text, bytes) else text
    containers = text.count("{") + text.count("[")  # also those in strings
    if containers > _MAX_CONTAINERS:
        raise ValueError(f"more than {_MAX_CONTAINERS:,} objects and arrays")
    try:
        value = json.loads(text, **hooks)
    except RecursionError:
        raise ValueError(f"more than {MAX_DEPTH} levels are nested") from None
    if containers > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise ValueError(f"more than {MAX_DEPTH} levels are nested")
    return value


def _short_int(most_digits: int, text: str) -> int:
    if len(text.removeprefix("-")) > most_digits:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def _is_deeper(value: Any, levels: int) -> bool:
    nested = [value]
    for _ in range(levels):
        containers = [inner.values() if isinstance(inner, dict) else inner for inner in nested]
        nested = [inner for container in containers for inner in container if isinstance(inner, dict | list)]
        if not nested:
            return False
    return True
