"""Files to samples in memory, for a run that trains from raw files; ``isthmus prepare`` makes the same into files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from isthmus.data.chat.chat_text import ChatTokenizer, LossOn
from isthmus.data.readers.file_formats import Columns, OnError, read_chunks
from isthmus.data.readers.file_sources import find_sources
from isthmus.data.store.sample_store import SampleStore
from isthmus.data.tokenize.stats import Overlong as Overlong
from isthmus.data.tokenize.stats import TokenizeStats as TokenizeStats
from isthmus.data.tokenize.tokenize_records import RecordTokenizer, TokenizedChunk, TokenizeOptions, notes
from isthmus.errors import DataError, UsageError

Sample = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]


def prepare_chat(
    files: Sequence[Path | str],
    tokenizer: ChatTokenizer,
    *,
    seq_length: int,
    loss_on: LossOn = "assistant",
    overlong: Overlong = "truncate",
    on_error: OnError = "stop",
    columns: Columns | None = None,
) -> tuple[SampleStore, TokenizeStats]:
    """Chat records to samples of at most ``seq_length`` + 1 tokens, with a mask of what the assistant said.

    Raises:
        MissingInput: a file is not there.
        DataError: a file or record is bad (``on_error="stop"``), or no sample is left.
        UsageError: ``seq_length`` is less than 1.
    """
    rules = TokenizeOptions("chat", seq_length, loss_on, overlong, on_error, columns or {})
    return _masked(files, tokenizer, rules)


def prepare_pairs(
    files: Sequence[Path | str],
    tokenizer: ChatTokenizer,
    *,
    seq_length: int,
    overlong: Overlong = "truncate",
    on_error: OnError = "stop",
    columns: Columns | None = None,
) -> tuple[SampleStore, TokenizeStats]:
    """Preference records to samples of at most ``seq_length`` + 1 tokens, with a mask of the answers.

    Sample 2k is the chosen answer of pair k behind its prompt and sample 2k + 1 the rejected one. What is left out is
    left out with its pair, and counted once: an answer that is too long, or of which nothing is left to learn, or two
    that are left with the same tokens.

    Raises:
        MissingInput, DataError, UsageError: as :func:`prepare_chat` does.
    """
    rules = TokenizeOptions("preference", seq_length, overlong=overlong, on_error=on_error, columns=columns or {})
    return _masked(files, tokenizer, rules)


def _masked(
    files: Sequence[Path | str], tokenizer: ChatTokenizer, rules: TokenizeOptions
) -> tuple[SampleStore, TokenizeStats]:
    """Each document of several sequences is a group of samples."""
    assert rules.seq_length is not None
    maker = RecordTokenizer(tokenizer, rules)
    report = TokenizeStats()
    samples: list[Sample] = []
    groups: list[int] = []
    for piece in _pieces(files, maker, report):
        assert piece.mask is not None
        ends = np.cumsum(piece.lengths)
        for start, end in zip(ends - piece.lengths, ends, strict=True):
            samples.append((piece.tokens[start:end], piece.mask[start:end]))
        first = groups[-1] + 1 if groups else 0
        groups += (first + np.repeat(np.arange(len(piece.documents)), piece.documents)).tolist()
    report.notes += notes(rules, report)
    return _store(samples, groups, report, files, rules.seq_length), report


def prepare_text(
    files: Sequence[Path | str],
    tokenizer: ChatTokenizer,
    *,
    seq_length: int,
    on_error: OnError = "stop",
    columns: Columns | None = None,
) -> tuple[SampleStore, TokenizeStats]:
    """Documents to samples of at most ``seq_length`` + 1 tokens, every token a target.

    A document ends with the end-of-sequence token and begins with the first token that the tokenizer itself puts there,
    if it does. A long one is cut into windows that share one token, so each token is a target exactly once.

    Raises:
        MissingInput: a file is not there.
        DataError: a file or record is bad (``on_error="stop"``), or no sample is left.
        UsageError: ``seq_length`` is less than 1, or the tokenizer has no end-of-sequence token.
    """
    maker = RecordTokenizer(tokenizer, TokenizeOptions("text", seq_length, on_error=on_error, columns=columns or {}))
    report = TokenizeStats()
    samples: list[Sample] = []
    for piece in _pieces(files, maker, report):
        ends = np.cumsum(piece.lengths)
        for start, end in zip(ends - piece.lengths, ends, strict=True):
            for at in range(start, end - 1, seq_length):
                window = piece.tokens[at : min(at + seq_length + 1, end)]
                samples.append((window, np.ones(len(window), dtype=np.uint8)))
    return _store(samples, list(range(len(samples))), report, files, seq_length), report


def _pieces(files: Sequence[Path | str], maker: RecordTokenizer, report: TokenizeStats) -> Iterator[TokenizedChunk]:
    """The pieces of all files in their order, counted."""
    if not files:
        raise UsageError("no data files given. Name at least one with --data.")
    sources = find_sources(files)
    report.notes += sources.notes()
    for chunk in read_chunks(sources.names):
        piece = maker(chunk)
        report.add(piece.report)
        yield piece


def _store(
    samples: list[Sample],
    groups: list[int],
    report: TokenizeStats,
    files: Sequence[Path | str],
    seq_length: int,
) -> SampleStore:
    """All samples; DataError when there are none."""
    store = SampleStore.from_samples(samples, groups)
    report.samples, report.tokens, report.learned_tokens = len(store), store.num_tokens, store.num_learned
    if not len(store):
        reason = f" First: {report.skipped.reasons[0]}" if report.skipped.reasons else ""
        raise DataError(
            f"{', '.join(map(str, files))}: no sample is left to train on (seq_length={seq_length}): "
            f"{report.line()}.{reason}"
        )
    return store
