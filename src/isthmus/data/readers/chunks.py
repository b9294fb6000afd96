"""Records, and chunks of a data source that any process can parse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from isthmus.errors import DataError, UnsafeInput
from isthmus.files.remote_files import file_bytes

OnError = Literal["stop", "skip"]
CHUNK_BYTES = 1 << 18
"""Approximate size of a chunk; one record may be larger."""
RECORD_BYTES = 1 << 25
"""Largest record, and longest line: what a chat template may make of one conversation."""
EXPANDED_BYTES, EXPANDED_RATIO = 1 << 28, 200
"""A file may expand to the larger of both: bytes, or times its size. Text compresses 3 to 20 times."""


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


@dataclass(frozen=True, slots=True)
class FirstRecords:
    """The first ``count`` records of a chunk."""

    chunk: RecordChunk
    count: int

    def parse(self) -> Iterator[Record | DataError]:
        return islice(self.chunk.parse(), self.count)


@dataclass(frozen=True, slots=True)
class KeptRecords:
    """A chunk without some of its records."""

    chunk: RecordChunk
    dropped: frozenset[int]

    def parse(self) -> Iterator[Record | DataError]:
        return (item for number, item in enumerate(self.chunk.parse()) if number not in self.dropped)


def kept_records(chunk: RecordChunk, dropped: frozenset[int] | None) -> RecordChunk:
    """The chunk without the records with the numbers ``dropped``."""
    return KeptRecords(chunk, dropped) if dropped else chunk


def first_records(chunks: Iterable[RecordChunk], most: int | None) -> Iterator[RecordChunk]:
    """The chunks with the first ``most`` records, all for None."""
    if most is None:
        yield from chunks
        return
    for chunk in chunks:
        count = sum(1 for _ in islice(chunk.parse(), most))
        yield FirstRecords(chunk, count)
        most -= count
        if not most:
            return


def read_line(file: BinaryIO, path: str, line: int) -> bytes:
    """The next line, number ``line``, or the rest of it; empty at the end."""
    raw = file.readline(RECORD_BYTES + 1)
    if len(raw) > RECORD_BYTES:
        raise too_large(f"{path}:{line}")
    return raw


def too_large(where: str) -> UnsafeInput:
    limit = f"{RECORD_BYTES / 2**20:g} MiB"
    return UnsafeInput(
        f"{where}: this record or line has more than {limit}, the limit. Is the file damaged? Else split the record."
    )


def expansion_limit(path: Path | str) -> int:
    """Bytes that the content of a compressed file may have."""
    return max(EXPANDED_BYTES, EXPANDED_RATIO * file_bytes(path))


def expands_too_much(path: Path | str) -> UnsafeInput:
    return UnsafeInput(
        f"{path}: expands to more than {EXPANDED_RATIO} times its size and {EXPANDED_BYTES / 2**20:g} MiB, as no text "
        "does. If it is data, write it without compression, as JSON Lines."
    )
