"""Files to records: JSON arrays, JSON lines and plain text, each record with the line it stands on.

The content decides how a file is read, not its name; only ``.txt`` is never looked into.
A plain text file is one document as it stands: nothing in it says where another would begin.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from isthmus.errors import DataError, IOFailure, MissingInput, UsageError

OnError = Literal["stop", "skip"]
_BLANKS = " \t\r\n"


@dataclass(slots=True)
class Skipped:
    """What was left out under ``on_error="skip"``: how many records, and the first few reasons."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)
    keep: int = 5

    def refuse(self, error: DataError, on_error: OnError) -> None:
        """Note ``error`` and go on, or raise it when ``on_error`` is ``"stop"``."""
        if on_error == "stop":
            raise error
        self.count += 1
        if len(self.reasons) < self.keep:
            self.reasons.append(str(error))


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON object of a file, or a whole text file under the key ``text``."""

    value: dict[str, Any]
    where: str
    """``file:line`` of its first character."""


def read_records(path: Path | str, *, on_error: OnError = "stop", skipped: Skipped | None = None) -> Iterator[Record]:
    """Yield the records of one file in their order.

    Raises:
        MissingInput: there is no such file.
        UsageError: the path is a folder.
        DataError: the file is empty or not JSON, or (``on_error="stop"``) a record of it is bad.
        IOFailure: reading failed.
    """
    path = Path(path)
    skipped = skipped if skipped is not None else Skipped()
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a data file. Name the .json, .jsonl or .txt files in it.")
    try:
        with path.open("rb") as file:
            start = file.read(4096)
        if path.suffix == ".txt":
            yield _whole_text(path)
            return
        first = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        if not first:
            raise DataError(f"{path}: the file is empty. Wanted JSON records or text.")
        if first == b"[":
            yield from _array(path, on_error, skipped)
        elif first == b"{":
            yield from _lines(path, on_error, skipped)
        else:
            raise DataError(
                f"{path}:1: not JSON: begins with {first!r}. Wanted a JSON array of objects, one JSON object a line, "
                "or plain text in a file that ends in .txt."
            )
    except FileNotFoundError as error:
        raise MissingInput(f"{path}: no such data file.") from error
    except OSError as error:
        raise IOFailure(f"{path}: cannot be read: {error.strerror or error}.") from error


def _whole_text(path: Path) -> Record:
    text = _decode(path.read_bytes(), path, 1)
    if not text.strip():
        raise DataError(f"{path}: the file is empty. Wanted text.")
    return Record({"text": text}, f"{path}:1")


def _lines(path: Path, on_error: OnError, skipped: Skipped) -> Iterator[Record]:
    """One JSON object a line; blank lines do not count."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                text = _decode(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw, path, number)
                yield _object(_parse(text, path, number), path, number)
            except DataError as error:
                if number == 1 and (single := _single_object(path)) is not None:
                    yield single
                    return
                skipped.refuse(error, on_error)


def _single_object(path: Path) -> Record | None:
    """A file that is one object written over several lines."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    return Record(value, f"{path}:1") if isinstance(value, dict) else None


def _array(path: Path, on_error: OnError, skipped: Skipped) -> Iterator[Record]:
    """One JSON array. A bad element is skippable, broken syntax is not: what follows it has no sure beginning."""
    text = _decode(path.read_bytes(), path, 1).removeprefix("\ufeff")
    decoder = json.JSONDecoder()
    position, line, counted = _blanks(text, text.index("[") + 1), 1, 0
    if text[position : position + 1] == "]":
        raise DataError(f"{path}: the JSON array is empty. Wanted at least one record.")
    while True:
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno}).") from error
        except RecursionError as error:
            raise DataError(f"{path}:{line}: not JSON that can be read: nested too deeply.") from error
        try:
            yield _object(value, path, line)
        except DataError as error:
            skipped.refuse(error, on_error)
        position = _blanks(text, position)
        mark = text[position : position + 1]
        if mark == "]":
            break
        if mark != ",":
            line += text.count("\n", counted, position)
            got = f"got {mark!r}" if mark else "the file ends"
            raise DataError(f"{path}:{line}: not JSON: wanted ',' or ']' after a record, {got}. Is the file cut short?")
        position = _blanks(text, position + 1)
    rest = _blanks(text, position + 1)
    if rest != len(text):
        raise DataError(f"{path}:{1 + text.count(chr(10), 0, rest)}: not JSON: there is more after the array's end.")


def _blanks(text: str, position: int) -> int:
    while position < len(text) and text[position] in _BLANKS:
        position += 1
    return position


def _decode(raw: bytes, path: Path, line: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line += raw.count(b"\n", 0, error.start)
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        raise DataError(f"{path}:{line}: not UTF-8: byte 0x{raw[error.start]:02x} at byte column {column}.") from error


def _parse(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{line}: not JSON: {error.msg} (column {error.colno}).") from error
    except RecursionError as error:
        raise DataError(f"{path}:{line}: not JSON that can be read: nested too deeply.") from error


def _object(value: Any, path: Path, line: int) -> Record:
    if not isinstance(value, dict):
        raise DataError(f"{path}:{line}: a record must be a JSON object, got {type(value).__name__}.")
    return Record(value, f"{path}:{line}")
