"""Files to samples: read, render, tokenize, mask, cut; and a report of all that was left out on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from isthmus.data.chat import ChatRenderer, ChatText, ChatTokenizer, LossOn
from isthmus.data.formats import Columns, OnError, Skipped, read_records
from isthmus.data.records import Conversation, Document, parse_record
from isthmus.data.sources import find_sources
from isthmus.data.spans import token_mask
from isthmus.data.split import split_validation as split_validation
from isthmus.data.store import Int32, SampleStore, UInt8
from isthmus.errors import DataError, UsageError

Overlong = Literal["drop", "truncate"]
Progress = Callable[[int], None]
"""Called with the number of records done so far."""
_BATCH_RECORDS = 512
_BATCH_CHARS = 4_000_000


@dataclass(slots=True)
class PrepareReport:
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
    skipped: Skipped = field(default_factory=Skipped)
    """Bad records left out under on_error=skip."""
    notes: list[str] = field(default_factory=list)

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


class _Samples:
    """Grows sample by sample; counts in the report as it goes."""

    def __init__(self, report: PrepareReport) -> None:
        self.report = report
        self._samples: list[tuple[Int32, UInt8]] = []
        self._groups: list[int] = []

    def add(self, tokens: Int32, mask: UInt8, group: int) -> bool:
        """Keep a sample, unless there is nothing to learn in it; returns whether it was kept."""
        if not mask[1:].any():
            self.report.dropped_nothing_to_learn += 1
            return False
        self._samples.append((tokens, mask))
        self._groups.append(group)
        return True

    def __len__(self) -> int:
        return len(self._samples)

    def store(self, files: Sequence[Path | str], seq_length: int) -> SampleStore:
        """All samples so far; DataError when there are none."""
        store = SampleStore.from_samples(self._samples, self._groups)
        report = self.report
        report.samples, report.tokens, report.learned_tokens = len(store), len(store.tokens), store.num_learned
        if not len(store):
            reason = f" First: {report.skipped.reasons[0]}" if report.skipped.reasons else ""
            raise DataError(
                f"{', '.join(map(str, files))}: no sample is left to train on (seq_length={seq_length}): "
                f"{report.line()}.{reason}"
            )
        return store


def prepare_chat(
    files: Sequence[Path | str],
    tokenizer: ChatTokenizer,
    *,
    seq_length: int,
    loss_on: LossOn = "assistant",
    overlong: Overlong = "truncate",
    on_error: OnError = "stop",
    columns: Columns | None = None,
    progress: Progress | None = None,
) -> tuple[SampleStore, PrepareReport]:
    """Chat records to samples of at most ``seq_length`` + 1 tokens, with a mask of what the assistant said.

    Raises:
        MissingInput: a file is not there.
        DataError: a file or record is bad (``on_error="stop"``), or no sample is left.
        UsageError: ``seq_length`` is less than 1.
    """
    _check_length(seq_length)
    report = PrepareReport()
    samples = _Samples(report)
    render = ChatRenderer(tokenizer, loss_on=loss_on)

    def texts() -> Iterator[tuple[int, str, ChatText]]:
        for record in _parsed(files, on_error, columns, report):
            try:
                if isinstance(record, Document):
                    raise DataError(f"{record.where}: plain text has no turns. Wanted chat records, or use pretrain.")
                rendered = render(record)
            except DataError as error:
                report.skipped.refuse(error, on_error)
                continue
            report.split_records += len(rendered) > 1
            report.dropped_nothing_to_learn += not rendered
            for chat in rendered:
                yield report.records, chat.text, chat

    for batch in _batches(texts()):
        encoded = tokenizer.encode_with_offsets([text for _, text, _ in batch])
        for (group, _, chat), (ids, offsets) in zip(batch, encoded, strict=True):
            long = len(ids) > seq_length + 1
            if long and overlong == "drop":
                report.dropped_overlong += 1
                continue
            ids, offsets = ids[: seq_length + 1], offsets[: seq_length + 1]
            kept = samples.add(np.asarray(ids, dtype=np.int32), token_mask(offsets, chat.learned), group)
            report.truncated += long and kept
        if progress is not None:
            progress(report.records)
    if render.unended and loss_on != "all":
        report.notes.append(
            f"the chat template ends {render.unended} answers with no special token, so the model may not learn to stop"
        )
    return samples.store(files, seq_length), report


def prepare_text(
    files: Sequence[Path | str],
    tokenizer: ChatTokenizer,
    *,
    seq_length: int,
    on_error: OnError = "stop",
    columns: Columns | None = None,
    progress: Progress | None = None,
) -> tuple[SampleStore, PrepareReport]:
    """Documents to samples of at most ``seq_length`` + 1 tokens, every token a target.

    A document ends with the end-of-sequence token and begins with the first token that the tokenizer itself puts there,
    if it does. A long one is cut into windows that share one token, so each token is a target exactly once.

    Raises:
        MissingInput: a file is not there.
        DataError: a file or record is bad (``on_error="stop"``), or no sample is left.
        UsageError: ``seq_length`` is less than 1, or the tokenizer has no end-of-sequence token.
    """
    _check_length(seq_length)
    if tokenizer.eos_id is None:
        raise UsageError("the tokenizer has no eos_token to end documents with. Set one in tokenizer_config.json.")
    before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    report = PrepareReport()
    samples = _Samples(report)

    def texts() -> Iterator[tuple[int, str, None]]:
        for record in _parsed(files, on_error, columns, report):
            if isinstance(record, Conversation):
                error = DataError(f"{record.where}: a chat record is no document. Wanted text, or use sft.")
                report.skipped.refuse(error, on_error)
            elif record.text.strip():
                yield report.records, record.text, None
            else:
                report.dropped_nothing_to_learn += 1

    for batch in _batches(texts()):
        for ids in tokenizer.encode_batch([text for _, text, _ in batch]):
            tokens = np.asarray([*before, *ids, tokenizer.eos_id], dtype=np.int32)
            for at in range(0, len(tokens) - 1, seq_length):
                window = tokens[at : at + seq_length + 1]
                samples.add(window, np.ones(len(window), dtype=np.uint8), len(samples))
        if progress is not None:
            progress(report.records)
    return samples.store(files, seq_length), report


def _check_length(seq_length: int) -> None:
    if seq_length < 1:
        raise UsageError(f"data.seq_length={seq_length}. Wanted 1 or more.")


def _parsed(
    files: Sequence[Path | str], on_error: OnError, columns: Columns | None, report: PrepareReport
) -> Iterator[Conversation | Document]:
    """The records of all files, counted."""
    if not files:
        raise UsageError("no data files given. Name at least one with --data.")
    sources = find_sources(files)
    report.notes += sources.notes()
    for name in sources.names:
        for record in read_records(name, on_error=on_error, skipped=report.skipped, columns=columns):
            report.records += 1
            try:
                yield parse_record(record)
            except DataError as error:
                report.skipped.refuse(error, on_error)


def _batches(texts: Iterator[tuple[int, str, Any]]) -> Iterator[list[tuple[int, str, Any]]]:
    """Groups of texts for the tokenizer, bounded in number and in characters."""
    batch: list[tuple[int, str, Any]] = []
    chars = 0
    for item in texts:
        batch.append(item)
        chars += len(item[1])
        if len(batch) >= _BATCH_RECORDS or chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
