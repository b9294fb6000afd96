"""Turns a chunk of records into token sequences and a loss mask."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from isthmus.data.chat.chat_records import Conversation, Kind, parse_document
from isthmus.data.chat.chat_text import AnswerRenderer, ChatRenderer, ChatText, ChatTokenizer, LossOn
from isthmus.data.chat.conversation_settings import UNCHANGED, ChatSettings
from isthmus.data.chat.rollout_records import PromptRecord
from isthmus.data.readers.chunks import OnError, Record, RecordChunk, SkippedRecords
from isthmus.data.readers.data_names import FIELDS
from isthmus.data.readers.file_formats import chunk_records
from isthmus.data.tokenize.record_kinds import RECORD_KINDS, RecordKind
from isthmus.data.tokenize.stats import Overlong, TokenizeStats, overlong_sample
from isthmus.errors import DataError, UsageError

T = TypeVar("T")
Sequenced = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8], ChatText]
"""Token ids and loss mask of one sequence, and its text."""
RecordKey = tuple[int, str]
"""Number of a record in its chunk, and its ``file:line``."""
_BATCH_RECORDS = 8192
_BATCH_CHARS = 4_000_000


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    kind: Kind
    seq_length: int | None = None
    """Maximum number of targets of a chat or an answer, which has one token more; None: no limit."""
    loss_on: LossOn = "assistant"
    overlong: Overlong = "truncate"
    on_error: OnError = "stop"
    columns: Mapping[str, str] = field(default_factory=dict)
    chat: ChatSettings = UNCHANGED
    max_records: int | None = None
    """Only the first records of all files; None: all."""

    @property
    def record_kind(self) -> RecordKind:
        """The traits of ``kind``."""
        return RECORD_KINDS[self.kind]


@dataclass(frozen=True, slots=True)
class TokenizedChunk:
    """The concatenated sequences of one chunk."""

    tokens: npt.NDArray[np.int32]
    """[total]."""
    mask: npt.NDArray[np.uint8] | None
    """[total], 1 where the token has loss; None: all tokens."""
    lengths: npt.NDArray[np.int64]
    """[n], of the sequences."""
    documents: npt.NDArray[np.int64]
    """[d], number of sequences of each document: a text, a conversation or a preference pair."""
    stats: TokenizeStats
    values: npt.NDArray[np.float32] | None = None
    """[n], the label of an answer or the margin of a pair; None: all zero."""
    columns: npt.NDArray[np.uint8] | None = None
    """Bytes of a line for each sequence, the fields of the record of a prompt; None for other records."""


class RecordTokenizer:
    """Tokenizes chunks of records; the chat template is probed once."""

    def __init__(self, tokenizer: ChatTokenizer, options: TokenizeOptions) -> None:
        if options.seq_length is not None and options.seq_length < 1:
            raise UsageError(f"data.seq_length={options.seq_length}. Expected 1 or more.")
        if options.overlong == "split" and options.record_kind.is_answers:
            raise UsageError(
                "overlong=split is for chats: a part of an answer is no answer. Use truncate, drop or error for "
                f"{options.kind} data."
            )
        self.options = options
        self._kind = options.record_kind
        self._tokenizer = tokenizer
        if self._kind.is_text:
            if tokenizer.eos_id is None:
                raise UsageError(
                    "the tokenizer has no eos_token to end documents with. Set one in tokenizer_config.json."
                )
            self._before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
            self._after = [tokenizer.eos_id]
        else:
            self._chat = ChatRenderer(tokenizer, loss_on=options.loss_on, settings=options.chat)
            self._answers = AnswerRenderer(tokenizer, settings=options.chat)

    def __call__(self, chunk: RecordChunk) -> TokenizedChunk:
        stats = TokenizeStats()
        done = self._tokenize_texts(chunk, stats) if self._kind.is_text else self._tokenize_chats(chunk, stats)
        stats.samples, stats.tokens = len(done.lengths), len(done.tokens)
        stats.count_lengths(done.lengths)
        firsts = np.cumsum(done.lengths) - done.lengths  # the first token of a sequence is never a target
        if done.mask is None:
            stats.loss_tokens = stats.tokens - stats.samples
        else:
            stats.loss_tokens = int(done.mask.sum(dtype=np.int64)) - int(done.mask[firsts].sum(dtype=np.int64))
        return done

    def _tokenize_texts(self, chunk: RecordChunk, stats: TokenizeStats) -> TokenizedChunk:
        tokens, lengths = array("i"), array("q")
        around = len(self._before) + len(self._after)
        for batch in _batches((text, None) for text in self._texts(chunk, stats)):
            for ids in self._tokenizer.encode_batch([text for text, _ in batch]):
                tokens.extend(self._before)
                tokens.extend(ids)
                tokens.extend(self._after)
                lengths.append(len(ids) + around)
        sizes = np.frombuffer(lengths, dtype=np.int64)
        return TokenizedChunk(np.frombuffer(tokens, dtype=np.int32), None, sizes, np.ones_like(sizes), stats)

    def _texts(self, chunk: RecordChunk, stats: TokenizeStats) -> Iterator[str]:
        for text in self._parsed(chunk, stats, parse_document):
            if text.strip():
                yield text
            else:
                stats.dropped_without_loss += 1

    def _tokenize_chats(self, chunk: RecordChunk, stats: TokenizeStats) -> TokenizedChunk:
        tokens: list[npt.NDArray[np.int32]] = [np.empty(0, dtype=np.int32)]
        masks: list[npt.NDArray[np.uint8]] = [np.empty(0, dtype=np.uint8)]
        documents: list[int] = []
        texts: list[ChatText] = []
        renderer = self._answers if self._kind.is_answers else self._chat
        without_end, empty_answers = renderer.without_end, renderer.empty_answers
        for (_, where), group in groupby(self._encode(self._chat_texts(chunk, stats)), key=lambda pair: pair[0]):
            sequences = self._fit([sequence for _, sequence in group], where, stats)
            tokens += [ids for ids, _, _ in sequences]
            masks += [mask for _, mask, _ in sequences]
            texts += [text for _, _, text in sequences]
            documents += [len(sequences)] if sequences else []
        stats.without_end = renderer.without_end - without_end
        stats.empty_answers = renderer.empty_answers - empty_answers
        lengths = np.fromiter((len(ids) for ids in tokens[1:]), dtype=np.int64, count=len(tokens) - 1)
        counts = np.array(documents, dtype=np.int64)
        has_values = self._kind.has_values or any(text.value for text in texts)
        columns = "".join(f"{text.columns}\n" for text in texts).encode()
        return TokenizedChunk(
            np.concatenate(tokens),
            np.concatenate(masks),
            lengths,
            counts,
            stats,
            np.array([text.value for text in texts], dtype=np.float32) if has_values else None,
            np.frombuffer(columns, dtype=np.uint8) if self._kind.has_columns else None,
        )

    def _chat_texts(self, chunk: RecordChunk, stats: TokenizeStats) -> Iterator[tuple[str, tuple[RecordKey, ChatText]]]:
        for where, rendered in self._parsed(chunk, stats, lambda record: (record.where, self._render(record))):
            stats.split_records += not self._kind.is_answers and len(rendered) > 1
            stats.dropped_without_loss += not rendered
            for chat in rendered:
                yield chat.text, ((stats.records, where), chat)

    def _render(self, record: Record) -> Sequence[ChatText]:
        assert self._kind.parse is not None
        parsed = self._kind.parse(record)
        if isinstance(parsed, PromptRecord):
            return [self._chat.prompt_text(parsed)]
        return self._chat(parsed) if isinstance(parsed, Conversation) else self._answers(parsed)

    def _encode(self, texts: Iterator[tuple[str, tuple[RecordKey, ChatText]]]) -> Iterator[tuple[RecordKey, Sequenced]]:
        """(record, sequence) of each text."""
        for batch in _batches(texts):
            spans = [chat.loss_spans for _, (_, chat) in batch]
            encoded = self._tokenizer.encode_with_mask([text for text, _ in batch], spans)
            for (_, (key, chat)), (ids, mask) in zip(batch, encoded, strict=True):
                yield key, (ids, mask, chat)

    def _fit(self, sequences: list[Sequenced], where: str, stats: TokenizeStats) -> list[Sequenced]:
        """The sequences of one record, cut, split or dropped; a pair is kept or dropped as a whole."""
        most = self.options.seq_length + 1 if self.options.seq_length is not None else None
        is_pair = len(self._kind.roles) == 2
        if not self._kind.is_answers and len(sequences) > 1:
            stats.split_tokens += sum(len(ids) for ids, _, _ in sequences)
            stats.unsplit_tokens += len(sequences[-1][0])
        fitting: list[Sequenced] = []
        overlong = without_loss = truncated = 0
        for ids, mask, text in sequences:
            long = most is not None and len(ids) > most
            if long and self.options.overlong == "error":
                raise DataError(f"{where}: {overlong_sample(len(ids) - 1, self.options.seq_length)}")
            if long and self.options.overlong == "drop":
                overlong += 1
            elif long and self.options.overlong == "split":
                parts = [part for part in _windows(ids, mask, len(ids[:most]) - 1) if part[1][1:].any()]
                fitting += [(*part, text) for part in parts]
                stats.split_overlong += bool(parts)
                without_loss += not parts
            elif not mask[1:most].any():
                without_loss += 1
            else:
                fitting.append((ids[:most], mask[:most], text))
                truncated += long
        if is_pair and len(fitting) == 2 and np.array_equal(fitting[0][0], fitting[1][0]):
            fitting, without_loss = [], 1  # identical answers, or cut before they differ
        if is_pair and len(fitting) < 2:
            fitting, overlong, without_loss = [], int(overlong > 0), int(not overlong)
        stats.dropped_overlong += overlong
        stats.dropped_without_loss += without_loss
        stats.truncated += truncated if fitting else 0
        return fitting

    def _parsed(self, chunk: RecordChunk, stats: TokenizeStats, parse: Callable[[Record], T]) -> Iterator[T]:
        """The parsed records of a chunk, counted; bad ones and those of another kind are skipped or raise."""
        options, unreadable, known = self.options, SkippedRecords(), frozenset(FIELDS)
        for record in chunk_records(chunk, on_error=options.on_error, skipped=unreadable, columns=options.columns):
            stats.records += 1
            if not (self._kind.is_text or self._kind.has_columns) and not known.issuperset(record.value):
                stats.unused_fields.update(str(name)[:40] for name in record.value if name not in known)
            try:
                self._kind.check(record)
                parsed = parse(record)
            except DataError as error:
                stats.skipped.skip_or_raise(error, options.on_error)
            else:
                yield parsed
        stats.records += unreadable.count
        stats.skipped.add(unreadable)


def notes_on(options: TokenizeOptions, stats: TokenizeStats) -> list[str]:
    """What may be wrong with the data, for the user."""
    notes = []
    dropped = stats.dropped_overlong + stats.dropped_without_loss + stats.skipped.count
    if 2 * dropped > stats.records:
        notes.append(f"most of the data is left out: {dropped} of {stats.records} records have no sample")
    if stats.split_records:
        notes.append(
            f"{stats.split_records} chats are split by turn, because the chat template renders earlier turns "
            f"differently when more follow: {stats.split_tokens:,} tokens instead of {stats.unsplit_tokens:,}. "
            "chat.split_turns=false keeps each as one sample, with earlier answers as the template renders them there"
        )
    if stats.without_end and options.loss_on != "all":
        notes.append(
            f"the chat template puts no special token after {stats.without_end} answers, so the model may not learn to "
            "stop"
        )
    if stats.empty_answers:
        notes.append(f"{stats.empty_answers} answers are empty, so the model learns to answer nothing")
    if stats.unused_fields:
        names = ", ".join(f"{name} ({count})" for name, count in stats.unused_fields.most_common(8))
        more = len(stats.unused_fields) - 8
        notes.append(f"fields that are not used: {names}{f' and {more} more' if more > 0 else ''}")
    return notes


def _windows(
    ids: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8], targets: int
) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
    """Parts of at most ``targets`` + 1 tokens; adjacent ones share a token, so each is a target once."""
    for start in range(0, len(ids) - 1, targets):
        yield ids[start : start + targets + 1], mask[start : start + targets + 1]


def _batches(texts: Iterator[tuple[str, T]]) -> Iterator[list[tuple[str, T]]]:
    """Batches of texts for the tokenizer, limited in number and in characters."""
    batch: list[tuple[str, T]] = []
    chars = 0
    for item in texts:
        batch.append(item)
        chars += len(item[0])
        if len(batch) >= _BATCH_RECORDS or chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
