"""Records, and chunks of a data source that any process can parse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, Protocol

from isthmus.errors import DataError

OnError = Literal["stop", "skip"]
CHUNK_BYTES = 1 << 18
"""Approximate size of a chunk; one record may be larger."""
RECORD_BYTES = 1 << 28
"""Largest record, and longest line."""


@dataclass(slots=True)
class SkippedRecords:
    """The number of bad records skipped under ``on_error="skip"``, and the first reasons."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)
    keep: int = 5

    def skip_or_raise(self, error: DataError, on_error: OnError) -> None:
        if on_error == "stop":
            raise error
        self.count += 1
        if len(self.reasons) < self.keep:
            self.reasons.append(str(error))

    def add(self, other: SkippedRecords) -> None:
        self.count += other.count
        self.reasons = [*self.reasons, *other.reasons][: self.keep]


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON object or row, or a whole text file under the key ``text``."""

    value: dict[str, Any]
    where: str
    """``file:line`` of its first character, or ``file:row``, counted from 1."""


class RecordChunk(Protocol):
    """About ``CHUNK_BYTES`` of one source; picklable."""

    def parse(self) -> Iterator[Record | DataError]:
        """Its records in order, a bad one as its error; raises DataError if the rest cannot be read."""


def read_line(file: BinaryIO, path: str) -> bytes:
    """The next line, or the rest of it; empty at the end."""
    raw = file.readline(RECORD_BYTES + 1)
    if len(raw) > RECORD_BYTES:
        raise too_large(path)
    return raw


def too_large(where: str) -> DataError:
    return DataError(f"{where}: a record of more than {RECORD_BYTES >> 20} MiB. Is the file damaged? Else split it.")
