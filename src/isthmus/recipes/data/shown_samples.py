"""Samples for a reader: the text of their tokens, divided where the loss mask of the batches changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.data.batching.batches import AnswerBatches, Batches, BatchSettings, PairBatches
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.data.chat.chat_records import Kind
from isthmus.data.chat.conversation_settings import UNCHANGED
from isthmus.data.readers.chunks import Record
from isthmus.data.readers.file_formats import check_columns, read_chunks
from isthmus.data.readers.file_sources import find_sources, first_names
from isthmus.data.store.answer_views import ScoredSamples
from isthmus.data.store.indexed_dataset import open_indexed
from isthmus.data.store.sample_store import Samples, SampleStore, TokenSource
from isthmus.data.tokenize.record_kinds import RECORD_KINDS, RecordKind
from isthmus.data.tokenize.tokenize_records import RecordTokenizer, TokenizedChunk, TokenizeOptions
from isthmus.errors import DataError, UsageError
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.data.data_sources import DataSource, tokenizer_record
from isthmus.recipes.data.prepare import check_text_options, kind_of_first

Decode = Callable[[Sequence[int]], str]
_CONTEXT = 4
"""Tokens decoded before a part: some tokenizers omit the space before the first token of a text."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text of adjacent tokens that all have loss, or all have none."""

    text: str
    has_loss: bool


@dataclass(frozen=True, slots=True)
class ShownSample:
    name: str
    """``file:line`` of a record, or the number of a sample."""
    role: str
    """Role of an answer: chosen, rejected, desirable or undesirable. Else empty, or why a record has no sample."""
    input_ids: tuple[int, ...]
    """All tokens, [n]; the first is never a target."""
    loss_mask: tuple[bool, ...]
    """[n], whether the token is a target with loss; of a reward model, whether its score is read there."""
    parts: tuple[TextPart, ...]

    def as_dict(self) -> dict[str, Any]:
        """The sample for ``--json``."""
        return {
            "name": self.name,
            "role": self.role,
            "tokens": len(self.input_ids),
            "loss_tokens": sum(self.loss_mask),
            "input_ids": list(self.input_ids),
            "loss_mask": list(map(int, self.loss_mask)),
            "parts": [{"text": part.text, "loss": part.has_loss} for part in self.parts],
        }

    def __str__(self) -> str:
        counts = f"{len(self.input_ids):,} tokens, {sum(self.loss_mask):,} with loss" if self.input_ids else ""
        return "  ".join(word for word in (self.name, self.role, counts) if word)


def shown_step(batches: Batches, step: int, decode: Decode) -> Iterator[ShownSample]:
    """The samples of a step, counted from 0, of one data-parallel rank."""
    for batch in batches.step(step):
        for number, (index, tokens, mask) in enumerate(_samples_of(batch, batches.store)):
            parts = tuple(_parts(tokens, mask, decode))
            yield ShownSample(f"sample {index}", batches.role(batch, number), tuple(tokens), tuple(mask), parts)


def _samples_of(batch: PackedBatch, store: Samples) -> Iterator[tuple[int, list[int], list[bool]]]:
    """(index, tokens, loss mask) of the samples of a micro batch; a sample of several documents has several lengths."""
    assert batch.loss_mask is not None
    mask, start, number = batch.loss_mask.tolist(), 0, 0
    while number < len(batch.sample_ids):
        index = batch.sample_ids[number]
        tokens = store[index][0].tolist()
        end = start + len(tokens) - 1
        if isinstance(store, ScoredSamples):
            yield index, tokens[:-1], mask[start:end]
        else:
            yield index, tokens, [False, *mask[start:end]]
        while start < end:
            start += batch.lengths[number]
            number += 1


def _parts(tokens: Sequence[int], mask: Sequence[bool], decode: Decode) -> Iterator[TextPart]:
    start = 0
    for has_loss, group in groupby(mask):
        end = start + sum(1 for _ in group)
        before = tokens[max(0, start - _CONTEXT) : start]
        context, text = decode(before), decode([*before, *tokens[start:end]])
        # A character whose bytes are in two parts is not in the text of the first.
        yield TextPart(text.removeprefix(context) if text.startswith(context) else decode(tokens[start:end]), has_loss)
        start = end


def shown_files(
    source: DataSource,
    tokenizer: Tokenizer,
    *,
    first: int = 0,
    count: int,
    chat_template: str | None = None,
    **options: Any,
) -> Iterator[ShownSample]:
    """The samples of ``count`` records of raw files, or ``count`` samples of indexed ones.

    Args:
        source: raw files, or one prefix of indexed files.
        tokenizer: of the model, or that with which the files were prepared.
        first: the first record or sample, counted from 0.
        chat_template: replaces that of the tokenizer.
        options: of :class:`TokenizeOptions`, for raw files; ``kind`` None: the kind of the first record.

    Raises:
        DataError: one of the records is bad, or a file is damaged.
        UsageError: there is no record ``first``, or the options do not fit the data.
    """
    if source.prepared:
        if len(source.files) > 1:
            listed = ", ".join(source.files)
            raise UsageError(f"{source.name} has {len(source.files)} prepared data sets: {listed}. Name one of them.")
        return _indexed_samples(Path(source.files[0]), tokenizer, first, count)
    check_columns(options["columns"])
    names = find_sources(source.files).names
    kind = options.pop("kind") or kind_of_first(names, "stop", options["columns"])
    if RECORD_KINDS[kind].is_text:
        has_chat_options = chat_template is not None or options["chat"] != UNCHANGED
        check_text_options(options["seq_length"], has_chat_options=has_chat_options)
    tokenizer.use_chat_template(chat_template)
    tokenize = RecordTokenizer(tokenizer, TokenizeOptions(kind, **options))
    return _record_samples(names, tokenize, tokenizer.decode, first, count)


def _record_samples(
    names: Sequence[str], tokenize: RecordTokenizer, decode: Decode, first: int, count: int
) -> Iterator[ShownSample]:
    """A record without a sample is shown without tokens, with the reason."""
    shown = 0
    items = (item for chunk in read_chunks(names) for item in chunk.parse())
    for item in islice(items, first, first + count):
        shown += 1
        done = tokenize(_OneRecord(item))
        name = item.where if isinstance(item, Record) else ""
        if not len(done.lengths):
            why = ", ".join(done.stats.changes()) or "no text"
            yield ShownSample(name, f"no sample: {why}", (), (), ())
            continue
        batches = _in_order(_store_of(done), tokenize.options.record_kind)
        for step in range(batches.sequences_per_epoch):
            for sample in shown_step(batches, step, decode):
                yield replace(sample, name=name)
    if not shown:
        raise UsageError(f"{first_names(names)}: no record {first}. Records are counted from 0; lower --index.")


@dataclass(frozen=True, slots=True)
class _OneRecord:
    """A chunk of one record."""

    item: Record | DataError

    def parse(self) -> Iterator[Record | DataError]:
        yield self.item


def _store_of(done: TokenizedChunk) -> SampleStore:
    groups = np.repeat(np.arange(len(done.documents), dtype=np.int64), done.documents)
    source = TokenSource.from_arrays(done.tokens, done.mask)
    return SampleStore([source], np.cumsum(done.lengths) - done.lengths, done.lengths, groups, values=done.values)


def _indexed_samples(prefix: Path, tokenizer: Tokenizer, first: int, count: int) -> Iterator[ShownSample]:
    """Documents of text, samples of chats, or pairs."""
    indexed = open_indexed(prefix)
    record: dict[str, Any] = indexed.manifest or {}
    kind: Kind = record.get("kind") or ("text" if indexed.mask is None else "chat")
    known = record.get("tokenizer", {}).get("vocabulary")
    store = SampleStore.from_indexed(indexed)
    if known not in (None, tokenizer_record(tokenizer)["vocabulary"]) or store.max_token_id >= tokenizer.vocab_size:
        raise UsageError(f"{prefix}: prepared with another tokenizer. Give that one with --tokenizer.")
    per_sequence = max(1, len(RECORD_KINDS[kind].roles))
    selected = np.arange(per_sequence * first, min(per_sequence * (first + count), len(store)))
    if not len(selected):
        number = len(store) // per_sequence
        raise UsageError(f"{prefix}: no sample {first}; it has {number:,}. They are counted from 0.")
    batches = _in_order(store.select(selected), RECORD_KINDS[kind])
    for step in range(batches.sequences_per_epoch):
        for sample in shown_step(batches, step, tokenizer.decode):
            yield replace(sample, name=f"sample {first + step}")


def _in_order(store: SampleStore, kind: RecordKind) -> Batches:
    """Batches of one sample, or one pair, in the order of the store."""
    make = PairBatches if kind.roles else AnswerBatches if kind.is_answers else Batches
    settings = BatchSettings(
        seq_length=int(store.lengths.max(initial=1)),
        micro_batch_size=1,
        global_batch_size=1,
        packing=False,
        shuffle=False,
    )
    return make(store, settings)
