"""Counts of tokenized and dropped records and samples."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from isthmus.data.readers.chunks import SkippedRecords
from isthmus.errors import counted

if TYPE_CHECKING:
    from isthmus.data.tokenize.record_kinds import RecordKind

Overlong = Literal["drop", "truncate", "split", "error"]
"""Handling of samples of more than seq_length + 1 tokens."""


def overlong_sample(tokens: int, seq_length: int | None) -> str:
    """What ``overlong=error`` reports."""
    return (
        f"a sample of {tokens} tokens, more than seq_length={seq_length}. Raise data.seq_length, or let data.overlong "
        "truncate, split or drop such samples."
    )


@dataclass(slots=True)
class TokenizeStats:
    records: int = 0
    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    split_records: int = 0
    """Conversations with several samples, since the chat template rewrites earlier turns."""
    split_tokens: int = 0
    """Tokens of these samples."""
    unsplit_tokens: int = 0
    """Tokens of these conversations if each were one sample."""
    truncated: int = 0
    """Samples cut to seq_length."""
    split_overlong: int = 0
    """Samples that became several of seq_length."""
    dropped_overlong: int = 0
    dropped_without_loss: int = 0
    """Samples dropped because no token has loss (cut off, or weight 0)."""
    without_end: int = 0
    """Texts whose last answer has no special token after it, so they do not teach the model to stop."""
    empty_answers: int = 0
    """Answers with loss that have neither text nor calls."""
    unused_fields: Counter[str] = field(default_factory=Counter)
    """Number of records by the name of a field that is not read."""
    skipped: SkippedRecords = field(default_factory=SkippedRecords)
    lengths: Counter[int] = field(default_factory=Counter)
    """Histogram of sample lengths: key 2**k counts samples of 2**(k-1) + 1 to 2**k tokens."""
    notes: list[str] = field(default_factory=list)

    @property
    def loss_share(self) -> float:
        """Share of the tokens that have loss, 0..1."""
        return self.loss_tokens / max(1, self.tokens)

    def add(self, other: TokenizeStats) -> None:
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.skipped.add(other.skipped)
        self.lengths += other.lengths
        self.unused_fields += other.unused_fields
        self.notes += [note for note in other.notes if note not in self.notes]

    def count_lengths(self, lengths: npt.NDArray[np.int64]) -> None:
        powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
        self.lengths.update({1 << power: int(count) for power, count in enumerate(np.bincount(powers)) if count})

    def summary(self, kind: RecordKind) -> str:
        """One line for records of ``kind``; counts of zero are omitted."""
        samples = f"{counted(self.records, 'record')} -> {kind.counted(self.samples)}"
        tokens = [counted(self.tokens, "token"), f"{self.loss_tokens:,} with loss"]
        return ", ".join([samples, *tokens[: 1 if kind.has_columns else 2], *self.changes()])

    def changes(self) -> list[str]:
        """The counts above zero of split, cut, dropped and skipped samples."""
        counts = {
            "conversations split by turn": self.split_records,
            "cut to seq_length": self.truncated,
            "longer than seq_length and split": self.split_overlong,
            "dropped as too long": self.dropped_overlong,
            "dropped without loss tokens": self.dropped_without_loss,
            "bad records skipped": self.skipped.count,
        }
        return [f"{count:,} {what}" for what, count in counts.items() if count]

    def as_dict(self) -> dict[str, Any]:
        """All counts, for a manifest."""
        counts: dict[str, Any] = {name: getattr(self, name) for name in _COUNTS}
        lengths = {str(length): self.lengths[length] for length in sorted(self.lengths)}
        skipped = {"count": self.skipped.count, "first_reasons": self.skipped.reasons}
        rest = {"lengths": lengths, "unused_fields": dict(self.unused_fields), "notes": self.notes}
        return counts | {"skipped": skipped, **rest}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TokenizeStats:
        skipped = SkippedRecords(values["skipped"]["count"], list(values["skipped"]["first_reasons"]))
        lengths = Counter({int(length): int(count) for length, count in values["lengths"].items()})
        counts = {name: int(values[name]) for name in _COUNTS}
        unused = Counter(values["unused_fields"])
        return cls(skipped=skipped, lengths=lengths, unused_fields=unused, notes=list(values["notes"]), **counts)


_COUNTS = tuple(item.name for item in fields(TokenizeStats) if item.type == "int")
