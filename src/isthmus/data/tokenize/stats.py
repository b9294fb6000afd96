"""What became of the records of some data: what came out, and what was left out for which reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from isthmus.data.readers.chunks import SkippedRecords

Overlong = Literal["drop", "truncate"]
"""What becomes of a sample of more than seq_length + 1 tokens."""
_COUNTS = (
    "records",
    "samples",
    "tokens",
    "learned_tokens",
    "split_records",
    "truncated",
    "dropped_overlong",
    "dropped_nothing_to_learn",
    "unended",
)


@dataclass(slots=True)
class TokenizeStats:
    """What came in, what came out, and what was left out for which reason."""

    records: int = 0
    samples: int = 0
    tokens: int = 0
    learned_tokens: int = 0
    split_records: int = 0
    """Conversations that became several samples, since the chat template rewrites earlier turns."""
    truncated: int = 0
    """Samples cut to seq_length."""
    dropped_overlong: int = 0
    """Samples longer than seq_length, left out."""
    dropped_nothing_to_learn: int = 0
    """Samples with no token to learn (cut off, or weight 0), left out."""
    unended: int = 0
    """Texts whose last answer ends with no special token: nothing in them teaches to stop."""
    skipped: SkippedRecords = field(default_factory=SkippedRecords)
    """Bad records left out under on_error=skip."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Samples by length: under 2**k those of at most so many tokens, and more than half as many."""
    notes: list[str] = field(default_factory=list)

    def add(self, other: TokenizeStats) -> None:
        """Count what came after this as well."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.skipped.add(other.skipped)
        self.lengths += other.lengths
        self.notes += [note for note in other.notes if note not in self.notes]

    def count_lengths(self, lengths: npt.NDArray[np.int64]) -> None:
        """Add samples of these lengths to the histogram."""
        powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
        self.lengths.update({1 << power: int(count) for power, count in enumerate(np.bincount(powers)) if count})

    def line(self) -> str:
        """The report in one line, for people; parts that are zero are not mentioned."""
        parts = [f"{self.records} records -> {self.samples} samples, {self.tokens} tokens"]
        parts.append(f"{self.learned_tokens} learned")
        counts = {
            "conversations split by turn": self.split_records,
            "cut to seq_length": self.truncated,
            "dropped as too long": self.dropped_overlong,
            "dropped with nothing to learn": self.dropped_nothing_to_learn,
            "bad records skipped": self.skipped.count,
        }
        return ", ".join([*parts, *(f"{count} {what}" for what, count in counts.items() if count)])

    def as_dict(self) -> dict[str, Any]:
        """All of it, for a manifest; ``from_dict`` reads it back."""
        counts: dict[str, Any] = {name: getattr(self, name) for name in _COUNTS}
        lengths = {str(length): self.lengths[length] for length in sorted(self.lengths)}
        skipped = {"count": self.skipped.count, "first_reasons": self.skipped.reasons}
        return counts | {"skipped": skipped, "lengths": lengths, "notes": self.notes}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TokenizeStats:
        """The report that ``as_dict`` gave."""
        skipped = SkippedRecords(values["skipped"]["count"], list(values["skipped"]["first_reasons"]))
        lengths = Counter({int(length): int(count) for length, count in values["lengths"].items()})
        counts = {name: int(values[name]) for name in _COUNTS}
        return cls(skipped=skipped, lengths=lengths, notes=list(values["notes"]), **counts)
