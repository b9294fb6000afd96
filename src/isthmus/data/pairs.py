"""Pairs of answers, the better and the worse one, to samples: two for each pair, one after the other, in one group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from isthmus.data.chat import ChatRenderer, ChatText, ChatTokenizer
from isthmus.data.formats import OnError, read_records
from isthmus.data.preference import parse_preference
from isthmus.data.records import Conversation, Message, Preference
from isthmus.data.report import Overlong, PrepareReport
from isthmus.data.spans import token_mask
from isthmus.data.store import Int32, SampleStore, UInt8
from isthmus.errors import DataError, UsageError

_PAIRS_AT_ONCE = 256
Sample = tuple[Int32, UInt8]
"""Tokens, and which of them are learned."""


def prepare_pairs(
    files: Sequence[Path | str],
    tokenizer: ChatTokenizer,
    *,
    seq_length: int,
    overlong: Overlong = "truncate",
    on_error: OnError = "stop",
) -> tuple[SampleStore, PrepareReport]:
    """Preference records to samples of at most ``seq_length`` + 1 tokens, with a mask of the answers.

    Sample 2k is the chosen answer of pair k behind its prompt and sample 2k + 1 the rejected one. What is left out is
    left out with its pair, and counted once: an answer that is too long, or of which nothing is left to learn, or two
    that are left with the same tokens.

    Raises:
        MissingInput: a file is not there.
        DataError: a file or record is bad (``on_error="stop"``), or no pair is left.
        UsageError: ``seq_length`` is less than 1, or there are no files.
    """
    if seq_length < 1:
        raise UsageError(f"data.seq_length={seq_length}. Wanted 1 or more.")
    if not files:
        raise UsageError("no data files given. Name at least one with --data.")
    report = PrepareReport()
    render = PairRenderer(tokenizer)
    samples: list[Sample] = []
    groups: list[int] = []
    for numbers, texts in _batches(_rendered(files, render, on_error, report)):
        for number, pair in zip(numbers, tokenized(tokenizer, texts), strict=True):
            long = max(len(tokens) for tokens, _ in pair) > seq_length + 1
            if long and overlong == "drop":
                report.dropped_overlong += 1
                continue
            cut = [(tokens[: seq_length + 1], mask[: seq_length + 1]) for tokens, mask in pair]
            if not all(mask[1:].any() for _, mask in cut) or np.array_equal(cut[0][0], cut[1][0]):
                report.dropped_nothing_to_learn += 1
                continue
            report.truncated += sum(len(tokens) > seq_length + 1 for tokens, _ in pair)
            samples += cut
            groups += [number, number]
    store = SampleStore.from_samples(samples, groups)
    report.samples, report.tokens, report.learned_tokens = len(store), len(store.tokens), store.num_learned
    if not samples:
        reason = f" First: {report.skipped.reasons[0]}" if report.skipped.reasons else ""
        raise DataError(
            f"{', '.join(map(str, files))}: no pair is left to train on (seq_length={seq_length}): {report.line()}."
            f"{reason}"
        )
    if render.unended:
        report.notes.append(
            f"the chat template ends {render.unended} answers with no special token, so the model may not learn to stop"
        )
    return store, report


class PairRenderer:
    """Renders both conversations of a pair; learned is what follows the prompt and the assistant said."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        """Try the template; see :class:`~isthmus.data.chat.ChatRenderer` for the errors."""
        self._render = ChatRenderer(tokenizer)

    @property
    def unended(self) -> int:
        """Answers so far that end with no special token."""
        return self._render.unended

    def __call__(self, pair: Preference) -> tuple[ChatText, ChatText]:
        """The chosen and the rejected conversation.

        Raises:
            DataError: the template refuses one, or writes its answer in more than one way.
        """
        # What the assistant said in the prompt is the same in both, and nothing to prefer.
        asked = [turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in pair.prompt]
        return self._whole(pair, asked, pair.chosen), self._whole(pair, asked, pair.rejected)

    def _whole(self, pair: Preference, asked: list[Message], answer: list[Message]) -> ChatText:
        texts = self._render(Conversation([*asked, *answer], pair.tools, pair.where))
        if len(texts) == 1:
            return texts[0]
        why = "the chat template writes earlier turns of an answer in another way once later ones follow"
        raise DataError(
            f"{pair.where}: {why}, so it has no one probability. Give answers of one turn."
            if texts
            else f"{pair.where}: an answer has no turn of the assistant that counts."
        )


def tokenized(tokenizer: ChatTokenizer, pairs: Sequence[tuple[ChatText, ChatText]]) -> Iterator[tuple[Sample, Sample]]:
    """Both samples of each pair, at their whole length."""
    texts = [text for pair in pairs for text in pair]
    encoded = tokenizer.encode_with_offsets([text.text for text in texts])
    made = [
        (np.asarray(ids, dtype=np.int32), token_mask(offsets, text.learned))
        for text, (ids, offsets) in zip(texts, encoded, strict=True)
    ]
    yield from zip(made[::2], made[1::2], strict=True)


def _rendered(
    files: Sequence[Path | str], render: PairRenderer, on_error: OnError, report: PrepareReport
) -> Iterator[tuple[int, tuple[ChatText, ChatText]]]:
    """The pairs of all files, each with the number of its record, counted."""
    for file in files:
        for record in read_records(file, on_error=on_error, skipped=report.skipped):
            report.records += 1
            try:
                pair = render(parse_preference(record))
            except DataError as error:
                report.skipped.refuse(error, on_error)
                continue
            yield report.records, pair


def _batches(
    pairs: Iterator[tuple[int, tuple[ChatText, ChatText]]],
) -> Iterator[tuple[list[int], list[tuple[ChatText, ChatText]]]]:
    numbers: list[int] = []
    texts: list[tuple[ChatText, ChatText]] = []
    for number, pair in pairs:
        numbers.append(number)
        texts.append(pair)
        if len(texts) == _PAIRS_AT_ONCE:
            yield numbers, texts
            numbers, texts = [], []
    if texts:
        yield numbers, texts
