"""A file of JSON rows, one per line: ``metrics.jsonl`` and ``samples.jsonl`` of a run.

The last key of a row is its ``checksum``: the XXH32 of the row without it. A damaged row is left out with a warning,
and does not end a run.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import xxhash

from isthmus.errors import disk_errors
from isthmus.files.atomic_write import write_atomic
from isthmus.files.input_files import parse_json

_EVALUATIONS = ("valid_loss", "test_loss", "answer", "completion")
"""Keys of rows that a resumed run may compute again, at the step from which it resumes."""
_CHECKSUM = re.compile(rb', "checksum": "([0-9a-f]{8})"\}')


class RowFile:
    """Appends rows. What cannot be written stays in memory, and is written with a later row or by :meth:`sync`."""

    def __init__(self, path: Path, *, start: int, warn: Callable[[str], None], every_step: bool = False) -> None:
        """Remove what an interruption left: rows of steps after ``start``, and an incomplete last row.

        Args:
            warn: called if rows are damaged, and once if a row cannot be written.
            every_step: rows are missing if there is none of ``start``.

        Raises:
            NoSpace, IOFailure: an existing file cannot be written.
        """
        self._path, self._warn = path, warn
        self._file: FileIO | None = None
        self._size_bytes = 0
        self._unwritten: list[bytes] = []
        self._lock = threading.Lock()  # a background save syncs in its thread
        self._has_warned = False
        rows = list(rows_until(path, start))
        self._evaluations = {(start, kind) for row in rows if row["step"] == start for kind in _kinds(row)}
        """Step and kind of the evaluations that need not be recorded again."""
        if path.exists():
            if start and (missing := _missing(path, rows, start if every_step else None)):
                without = "The model card and reports lack these rows; training does not use them."
                warn(f"warning: {path} {missing}. {without}")
            write_atomic(path, _lines(rows))

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows of one step and kind, unless they are of an evaluation that the file has."""
        evaluations = {(rows[0]["step"], kind) for kind in _kinds(rows[0])}
        if evaluations & self._evaluations:
            return
        self._evaluations |= evaluations
        with self._lock:
            self._unwritten.append(_lines(rows))
        try:
            self._write()
        except OSError as error:
            if not self._has_warned:
                self._warn(
                    f"warning: {self._path} cannot be written ({error.strerror or error}). Its rows stay in memory; "
                    "they are written as soon as possible, and before a checkpoint is saved."
                )
            self._has_warned = True

    def sync(self) -> None:
        """Write all rows to the disk; raises NoSpace or IOFailure."""
        with disk_errors(self._path):
            self._write()
            if self._file is not None:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; raises as :meth:`sync` if rows cannot be written."""
        try:
            if self._unwritten:
                self.sync()
        finally:
            if self._file is not None:
                self._file.close()

    def _write(self) -> None:
        with self._lock:
            if self._file is None:
                self._file = FileIO(self._path, "ab")
                self._size_bytes = self._path.stat().st_size
            content = memoryview(b"".join(self._unwritten))
            try:
                while content:  # a full disk may take a part
                    content = content[self._file.write(content) :]
            except OSError:
                with suppress(OSError):
                    self._file.truncate(self._size_bytes)
                raise
            self._size_bytes += sum(map(len, self._unwritten))
            self._unwritten.clear()


def first_valid_loss(path: Path) -> float | None:
    """The first validation loss in a ``metrics.jsonl``: before the first step, also if the run was resumed."""
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError, OverflowError):  # another row, or one that is being written
            return float(parse_row(line)["valid_loss"])
    return None


def rows_until(path: Path, step: int) -> Iterator[dict[str, Any]]:
    """The intact rows of steps until ``step``, without their checksums; none for step 0, when a run begins anew."""
    for line in path.read_bytes().split(b"\n") if step and path.exists() else ():
        with suppress(ValueError):
            row = parse_row(line)
            if isinstance(row.get("step"), int) and row["step"] <= step:
                yield row


def parse_row(line: bytes) -> dict[str, Any]:
    """The row in a line, without its checksum; ValueError if it is damaged. Rows of other programs have no checksum."""
    if (checksum := _CHECKSUM.search(line)) is not None:
        if (
            checksum.end() != len(line)
            or xxhash.xxh32_hexdigest(line[: checksum.start()] + b"}") != checksum[1].decode()
        ):
            raise ValueError("the checksum differs")
        line = line[: checksum.start()] + b"}"
    row = parse_json(line)
    if not isinstance(row, dict):
        raise ValueError("it is no object")
    return row


def _missing(path: Path, rows: Sequence[Mapping[str, Any]], last_step: int | None) -> str:
    """What is wrong with the rows in a file; "" if nothing is. A last row without its end is no damage."""
    damaged = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            parse_row(line)
        except ValueError:
            damaged.append(number)
    if damaged:
        return f"has damaged rows (line {', '.join(map(str, damaged[:5]))}{' ...' if len(damaged) > 5 else ''})"
    if last_step is not None and all(row["step"] != last_step for row in rows):
        return f"has no row of step {last_step}, from which this run resumes"
    return ""


def _kinds(row: Mapping[str, Any]) -> list[str]:
    return [kind for kind in _EVALUATIONS if kind in row]


def _lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    lines = [json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") for row in rows]
    return b"".join(b'%b, "checksum": "%b"}\n' % (line[:-1], xxhash.xxh32_hexdigest(line).encode()) for line in lines)
