"""One chunk of records to token sequences, with a mask of what is learned; the same for every way data is prepared."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from isthmus.data.chat.chat_records import RECIPES, Conversation, Kind, kinds_of, parse_document, parse_record
from isthmus.data.chat.chat_text import ChatRenderer, ChatText, ChatTokenizer, LossOn
from isthmus.data.chat.preference_pairs import PairRenderer
from isthmus.data.chat.preference_records import parse_preference
from isthmus.data.readers.chunks import OnError, Record, RecordChunk, SkippedRecords
from isthmus.data.readers.file_formats import chunk_records
from isthmus.data.tokenize.stats import Overlong, TokenizeStats
from isthmus.errors import DataError, UsageError

T = TypeVar("T")
_BATCH_RECORDS = 8192
_BATCH_CHARS = 4_000_000
_WORDS: dict[Kind, str] = {"text": "plain text", "chat": "a chat record", "preference": "a preference pair"}


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    """What is to become of records."""

    kind: Kind
    seq_length: int | None = None
    """Most tokens that are predicted in a sequence of a chat or an answer, so it has one more; None: no limit."""
    loss_on: LossOn = "assistant"
    overlong: Overlong = "truncate"
    on_error: OnError = "stop"
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenizedChunk:
    """What a chunk became; sequences lie end to end."""

    tokens: npt.NDArray[np.int32]
    """[total]."""
    mask: npt.NDArray[np.uint8] | None
    """[total], 1 where the token is learned; None: all are."""
    lengths: npt.NDArray[np.int64]
    """[n], of the sequences."""
    documents: npt.NDArray[np.int64]
    """[d], how many sequences each document has; a document is a text, a conversation, or a pair of answers."""
    report: TokenizeStats


class RecordTokenizer:
    """Makes the sequences of one chunk after the other; what the chat template can do is found out once."""

    def __init__(self, tokenizer: ChatTokenizer, options: TokenizeOptions) -> None:
        """Check that the tokenizer can do what is asked.

        Raises:
            UsageError: ``seq_length`` is less than 1, or a tokenizer for text has no end-of-sequence token.
            DataError: the chat template does not show what is said.
        """
        if options.seq_length is not None and options.seq_length < 1:
            raise UsageError(f"data.seq_length={options.seq_length}. Wanted 1 or more.")
        self.options, self._tokenizer = options, tokenizer
        if options.kind == "text":
            if tokenizer.eos_id is None:
                raise UsageError(
                    "the tokenizer has no eos_token to end documents with. Set one in tokenizer_config.json."
                )
            self._before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
            self._after = [tokenizer.eos_id]
        else:
            self._chat = ChatRenderer(tokenizer, loss_on=options.loss_on)
            self._pair = PairRenderer(tokenizer)

    def __call__(self, chunk: RecordChunk) -> TokenizedChunk:
        """The sequences of a chunk.

        Raises:
            DataError: a record is bad or of another kind (``on_error="stop"``).
            MissingInput, IOFailure: the chunk cannot be read.
        """
        report = TokenizeStats()
        piece = self._text(chunk, report) if self.options.kind == "text" else self._chats(chunk, report)
        report.samples, report.tokens = len(piece.lengths), len(piece.tokens)
        report.count_lengths(piece.lengths)
        firsts = np.cumsum(piece.lengths) - piece.lengths  # the first token of a sequence is never predicted
        if piece.mask is None:
            report.learned_tokens = report.tokens - report.samples
        else:
            report.learned_tokens = int(piece.mask.sum(dtype=np.int64)) - int(piece.mask[firsts].sum(dtype=np.int64))
        return piece

    def _text(self, chunk: RecordChunk, report: TokenizeStats) -> TokenizedChunk:
        def texts() -> Iterator[str]:
            for record in self._records(chunk, report):
                try:
                    document = parse_document(record)
                except DataError as error:
                    report.skipped.refuse(error, self.options.on_error)
                    continue
                if document.text.strip():
                    yield document.text
                else:
                    report.dropped_nothing_to_learn += 1

        tokens, lengths = array("i"), array("q")
        around = len(self._before) + len(self._after)
        for batch in _batches((text, text) for text in texts()):
            for ids in self._tokenizer.encode_batch([text for text, _ in batch]):
                tokens.extend(self._before)
                tokens.extend(ids)
                tokens.extend(self._after)
                lengths.append(len(ids) + around)
        made = np.frombuffer(lengths, dtype=np.int64)
        return TokenizedChunk(np.frombuffer(tokens, dtype=np.int32), None, made, np.ones_like(made), report)

    def _chats(self, chunk: RecordChunk, report: TokenizeStats) -> TokenizedChunk:
        def texts() -> Iterator[tuple[str, tuple[int, ChatText]]]:
            for record in self._records(chunk, report):
                try:
                    rendered = self._render(record)
                except DataError as error:
                    report.skipped.refuse(error, self.options.on_error)
                    continue
                report.split_records += self.options.kind == "chat" and len(rendered) > 1
                report.dropped_nothing_to_learn += not rendered
                for chat in rendered:
                    yield chat.text, (report.records, chat)

        tokens: list[npt.NDArray[np.int32]] = [np.empty(0, dtype=np.int32)]
        masks: list[npt.NDArray[np.uint8]] = [np.empty(0, dtype=np.uint8)]
        groups = array("q")
        unended = self._unended
        for group, sequences in _grouped(self._encoded(_batches(texts()))):
            for ids, mask in self._fitting(sequences, report):
                tokens.append(ids)
                masks.append(mask)
                groups.append(group)
        report.unended = self._unended - unended
        lengths = np.fromiter((len(ids) for ids in tokens[1:]), dtype=np.int64, count=len(tokens) - 1)
        starts = np.flatnonzero(np.diff(np.frombuffer(groups, dtype=np.int64), prepend=0))
        documents = np.diff(starts, append=len(groups)).astype(np.int64)
        return TokenizedChunk(np.concatenate(tokens), np.concatenate(masks), lengths, documents, report)

    def _render(self, record: Record) -> Sequence[ChatText]:
        if self.options.kind == "preference":
            return self._pair(parse_preference(record))
        conversation = parse_record(record)
        assert isinstance(conversation, Conversation)
        return self._chat(conversation)

    def _encoded(
        self, batches: Iterator[list[tuple[str, tuple[int, ChatText]]]]
    ) -> Iterator[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
        for batch in batches:
            made = self._tokenizer.encode_with_mask(
                [text for text, _ in batch], [chat.learned for _, (_, chat) in batch]
            )
            for (_, (group, _)), (ids, mask) in zip(batch, made, strict=True):
                yield group, ids, mask

    def _fitting(
        self, sequences: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]], report: TokenizeStats
    ) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
        """The sequences of one record, cut or left out as the options say; of a pair both or none."""
        most = self.options.seq_length + 1 if self.options.seq_length is not None else None
        is_pair = self.options.kind == "preference"
        kept, overlong, nothing = [], 0, 0
        for ids, mask in sequences:
            long = most is not None and len(ids) > most
            if long and self.options.overlong == "drop":
                overlong += 1
            elif not mask[1:most].any():
                nothing += 1
            else:
                kept.append((ids[:most], mask[:most], long))
        if is_pair and len(kept) == 2 and np.array_equal(kept[0][0], kept[1][0]):
            kept, nothing = [], 1  # the same answer twice, or cut where they part
        if is_pair and len(kept) < 2:
            kept, overlong, nothing = [], int(overlong > 0), int(not overlong)
        report.dropped_overlong += overlong
        report.dropped_nothing_to_learn += nothing
        report.truncated += sum(long for _, _, long in kept)
        return [(ids, mask) for ids, mask, _ in kept]

    @property
    def _unended(self) -> int:
        return self._pair.unended if self.options.kind == "preference" else self._chat.unended

    def _records(self, chunk: RecordChunk, report: TokenizeStats) -> Iterator[Record]:
        """The records of a chunk, counted; those of another kind refused."""
        options, unread = self.options, SkippedRecords()
        columns = options.columns or None
        for record in chunk_records(chunk, on_error=options.on_error, skipped=unread, columns=columns):
            report.records += 1
            kinds = kinds_of(record)
            if kinds and options.kind not in kinds:
                kind = kinds[0]
                told = f"{_WORDS[kind]} among data of kind {options.kind}."
                told += f" Wanted {_WORDS[options.kind]}; this is for {RECIPES[kind]}."
                error = DataError(f"{record.where}: {told}")
                report.skipped.refuse(error, options.on_error)
                continue
            yield record
        report.records += unread.count
        report.skipped.add(unread)


def notes(options: TokenizeOptions, report: TokenizeStats) -> list[str]:
    """What whoever trains on the data should know."""
    if not report.unended or options.loss_on == "all":
        return []
    return [
        f"the chat template ends {report.unended} answers with no special token, so the model may not learn to stop"
    ]


def _grouped(
    sequences: Iterator[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.uint8]]],
) -> Iterator[tuple[int, list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]]]:
    """Neighbours of one record together."""
    current = 0
    together: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]] = []
    for group, ids, mask in sequences:
        if group != current:
            if together:
                yield current, together
            current, together = group, []
        together.append((ids, mask))
    if together:
        yield current, together


def _batches(texts: Iterator[tuple[str, T]]) -> Iterator[list[tuple[str, T]]]:
    """Groups of texts for the tokenizer, bounded in number and in characters."""
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
