"""What training data contains: kind of records, turns, lengths, duplicates and the share of tokens with loss."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isthmus.data.chat.chat_records import Conversation, Kind, PreferenceRecord
from isthmus.data.readers.chunks import Record, RecordChunk
from isthmus.data.readers.file_formats import read_chunks
from isthmus.data.tokenize.record_kinds import RECORD_KINDS, RecordKind
from isthmus.data.tokenize.stats import TokenizeStats
from isthmus.data.tokenize.tokenize_records import RecordTokenizer, TokenizeOptions
from isthmus.errors import DataError, UsageError, counted
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.data.data_sources import find_source
from isthmus.recipes.data.prepare import kind_of_first

MOST_RECORDS = 20_000
"""Records that are read; those of larger data sets are not looked at."""
_QUANTILES = (0.5, 0.95, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class DataSurvey:
    """The records of some files, as they are tokenized for training."""

    files: Sequence[str]
    kind: Kind
    records: int
    """That were read."""
    is_complete: bool
    """Whether these are all records."""
    turns: Mapping[int, int]
    """Number of chats by their number of messages; empty for other records."""
    lengths: npt.NDArray[np.int64]
    """[n], tokens of the sequences; a preference pair has two."""
    stats: TokenizeStats
    duplicates: int
    """Records that are equal to an earlier one."""
    bad: int
    """Records that cannot be read or are of another kind."""
    first_error: str | None

    def length(self, share: float) -> int:
        """Tokens that this share of the sequences does not exceed."""
        return int(np.quantile(self.lengths, share, method="higher")) if len(self.lengths) else 0

    def as_dict(self) -> dict[str, Any]:
        """The numbers for ``--json``."""
        return {
            "files": list(self.files),
            "kind": self.kind,
            "records": self.records,
            "complete": self.is_complete,
            "messages": {str(turns): number for turns, number in self.turns.items()},
            "tokens": self.stats.tokens,
            "loss_share": self.stats.loss_share,
            "lengths": {f"{share:g}": self.length(share) for share in _QUANTILES},
            "duplicates": self.duplicates,
            "bad": self.bad,
        }

    def lines(self) -> Iterator[str]:
        """The survey for a reader."""
        kind, more = RECORD_KINDS[self.kind], "" if self.is_complete else ", the first ones"
        formats = ", ".join(sorted({Path(name).suffix or "Hub" for name in self.files}))
        number = f"{counted(len(self.files), 'file')} ({formats}), {counted(self.records, 'record')}{more}"
        yield f"{number}: {kind.phrase} each"
        if self.turns:
            usual = Counter(self.turns).most_common(3)
            yield "  messages of a chat: " + ", ".join(f"{turns} in {number:,}" for turns, number in usual)
        values = ", ".join(
            f"{'longest' if share == 1 else f'{share:.0%}'} {self.length(share):,}" for share in _QUANTILES
        )
        yield f"  tokens of a sequence: {values}; {self.stats.tokens:,} in total, {self.stats.loss_share:.0%} with loss"
        if self.duplicates:
            yield f"  {counted(self.duplicates, 'duplicate')} ({self.duplicates / self.records:.1%})"
        yield from (f"  {change}" for change in self.stats.changes())
        if self.bad:
            yield f"  {counted(self.bad, 'bad record')}; the first: {self.first_error}"


@dataclass(frozen=True, slots=True)
class _RecordList:
    """Records as a chunk."""

    records: Sequence[Record]

    def parse(self) -> Iterator[Record | DataError]:
        return iter(self.records)


def survey(files: Sequence[str], tokenizer: Tokenizer, *, kind: Kind | None = None) -> DataSurvey:
    """Read and tokenize the first :data:`MOST_RECORDS` records of raw files.

    Args:
        files: names, folders, patterns or ids on the Hub, as ``data.files``.
        tokenizer: of the model.
        kind: of the records; None: that of the first one.

    Raises:
        DataError: no record is of this kind.
        UsageError: the data is prepared.
        MissingInput: a file does not exist.
    """
    source = find_source("train", ", ".join(files), "data.files", files)
    if source.prepared:
        raise UsageError(
            f"{source.name} is prepared: init looks at records. Give the files that it was made of, or write the "
            "config by hand: isthmus config show."
        )
    names = list(source.files)
    chosen = kind or kind_of_first(names, "skip", {})
    records, errors, is_complete = _read(names, RECORD_KINDS[chosen])
    tokenize = RecordTokenizer(tokenizer, TokenizeOptions(chosen, on_error="skip"))
    done = tokenize(_RecordList(records))
    if not len(done.lengths):
        reason = f" The first error: {errors[0]}" if errors else ""
        raise DataError(f"{source.name}: no record of kind {chosen} has a token with loss.{reason}")
    hashes = Counter(_digest(record) for record in records)
    bad = [*errors, *done.stats.skipped.reasons]
    return DataSurvey(
        names,
        chosen,
        len(records) + len(errors),
        is_complete,
        _turns(records, RECORD_KINDS[chosen]),
        done.lengths,
        done.stats,
        sum(hashes.values()) - len(hashes),
        len(errors) + done.stats.skipped.count,
        bad[0] if bad else None,
    )


def _read(names: Sequence[str], kind: RecordKind) -> tuple[list[Record], list[str], bool]:
    """Records of this kind, the errors of others, and whether these are all records."""
    records: list[Record] = []
    errors: list[str] = []
    for item in _items(read_chunks(names)):
        if len(records) + len(errors) == MOST_RECORDS:
            return records, errors, False
        if isinstance(item, DataError):
            errors.append(str(item))
            continue
        try:
            kind.check(item)
            if kind.parse is not None:
                kind.parse(item)
        except DataError as error:
            errors.append(str(error))
            continue
        records.append(item)
    return records, errors, True


def _items(chunks: Iterator[RecordChunk]) -> Iterator[Record | DataError]:
    for chunk in chunks:
        yield from chunk.parse()


def _digest(record: Record) -> bytes:
    return hashlib.sha256(json.dumps(record.value, sort_keys=True, default=str).encode()).digest()


def _turns(records: Sequence[Record], kind: RecordKind) -> Mapping[int, int]:
    if kind.parse is None:
        return {}
    parsed = (kind.parse(record) for record in records)
    return Counter(
        len(item.messages) if isinstance(item, Conversation) else len(item.prompt) + len(item.chosen)
        for item in parsed
        if isinstance(item, (Conversation, PreferenceRecord))
    )
