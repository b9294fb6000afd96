"""What a source is read into: chunks that another process can parse, and the records in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from isthmus.errors import DataError

OnError = Literal["stop", "skip"]
CHUNK_BYTES = 1 << 18
"""About how much a chunk holds; one record may be larger."""


@dataclass(slots=True)
class SkippedRecords:
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

    def add(self, other: SkippedRecords) -> None:
        """Count what another left out as well."""
        self.count += other.count
        self.reasons = [*self.reasons, *other.reasons][: self.keep]


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON object or row of a source, or a whole text file under the key ``text``."""

    value: dict[str, Any]
    where: str
    """``file:line`` of its first character, or ``file:row``, counted from 1."""


class RecordChunk(Protocol):
    """A piece of one source, of about ``CHUNK_BYTES``, that can be pickled."""

    def parse(self) -> Iterator[Record | DataError]:
        """Its records in their order, and in the place of a bad one what is wrong with it.

        Raises:
            DataError: the rest of the chunk cannot be read.
        """
