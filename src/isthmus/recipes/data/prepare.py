"""``isthmus prepare``: records to a pair of indexed files with a manifest, by several processes, in the records' order.

What comes out depends on the records, the tokenizer and the options alone: not on the number of processes, nor on how
often the work was ended and taken up again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import isthmus
from isthmus.data.chat.chat_records import Kind, kinds_of, parse_record
from isthmus.data.chat.chat_text import LossOn
from isthmus.data.readers.field_mapping import check_columns
from isthmus.data.readers.file_formats import OnError, chunk_records, read_chunks
from isthmus.data.readers.file_sources import find_sources
from isthmus.data.store.indexed_dataset import token_dtype
from isthmus.data.tokenize.stats import Overlong, TokenizeStats
from isthmus.data.tokenize.tokenize_records import RecordTokenizer, TokenizeOptions, notes
from isthmus.errors import DataError, UsageError
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.data.data_fingerprint import file_record, files_below, tokenizer_record
from isthmus.recipes.data.prepare_resume import Journal
from isthmus.recipes.data.prepare_workers import StartMethod, Workers
from isthmus.recipes.setup.run_tokenizer import named_tokenizer

Progress = Callable[[TokenizeStats], None]
"""Called with the counts so far."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was made, for people and for ``--json``."""

    out: str
    kind: Kind
    report: TokenizeStats
    time_s: float
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """All of it by name."""
        counts = self.report.as_dict()
        counts.pop("notes")
        skipped = counts.pop("skipped")
        return {
            "out": self.out,
            "kind": self.kind,
            **counts,
            "skipped": skipped["count"],
            "skipped_first_reasons": skipped["first_reasons"],
            "time_s": self.time_s,
            "notes": self.notes,
        }


def prepare(
    data: Sequence[Path | str],
    out: Path | str,
    tokenizer: Path | str,
    *,
    tokenizer_type: str | None = None,
    kind: Kind | None = None,
    seq_length: int | None = None,
    workers: int | None = None,
    loss_on: LossOn = "assistant",
    overlong: Overlong = "truncate",
    on_error: OnError = "stop",
    columns: Mapping[str, str] | None = None,
    trust_remote_code: bool = False,
    progress: Progress = lambda report: None,
    start_method: StartMethod | None = None,
) -> Prepared:
    """Tokenize data into ``OUT.bin``, ``OUT.idx``, ``OUT.json``, and ``OUT.mask.bin`` unless every token is learned.

    A text is a document of one sequence that ends with the end-of-sequence token; a conversation is a document of one
    sequence, or of more where the chat template rewrites earlier turns; a pair of answers is a document of two.

    Args:
        data: files, folders, patterns, or ``hf:`` names.
        out: prefix of the files to make; they must not exist.
        tokenizer: folder of it, its sentencepiece file, or an id on the Hub.
        tokenizer_type: Megatron-LM's name for its kind, which is checked; None: whatever it is.
        kind: of the records; None looks at the first.
        seq_length: samples of more tokens than this and one are cut or dropped; None: any length. Not for text.
        workers: processes; None is one for each core.
        loss_on: of chats, what is learned.
        overlong: what becomes of samples that are too long.
        on_error: what happens at a bad record.
        columns: what the files call the fields.
        trust_remote_code: whether a tokenizer may run code of its folder.
        progress: called after each chunk.
        start_method: of the processes; None takes the fastest that is safe.

    Raises:
        MissingInput, UsageError, DataError, UnsafeInput: the data or the tokenizer is absent, bad, or nothing is left.
        NoSpace, IOFailure: the files exist or cannot be written.
        Hang: a worker process was lost; the next call goes on from what is done.
    """
    start_s = time.monotonic()
    prefix = Path(out).absolute()
    columns = dict(columns or {})
    check_columns(columns)
    sources = find_sources(data)
    if prefix.name.endswith((".bin", ".idx", ".json")):
        raise UsageError(f"{out} is to be a prefix, to which .bin, .idx and .json are added. Leave the ending out.")
    if prefix.exists():
        mend = f"Name a prefix in it, as {out}/text" if prefix.is_dir() else "Was the name of the output forgotten"
        raise UsageError(
            f"{out} exists, and the last name is to be a prefix, to which .bin and .idx are added. {mend}?"
        )
    journal = Journal(prefix)
    if not journal.folder.exists():  # where it does, the names may be half given, which takes a reading of the data
        journal.refuse_existing()
    opened = named_tokenizer(str(tokenizer), tokenizer_type, trust_remote_code=trust_remote_code)
    kind = kind or _kind_of_first(sources.names, on_error, columns)
    if kind == "text" and seq_length is not None:
        raise UsageError(
            f"--seq-length {seq_length}: text is not cut when it is prepared, but when a run reads it, at that run's "
            "data.seq_length. Leave it out."
        )
    options = TokenizeOptions(kind, seq_length, loss_on, overlong, on_error, columns)
    maker = RecordTokenizer(opened, options)
    with Workers(maker, workers or cores(), start_method) as running:
        origin = _origin(options, opened, sources.names)
        with journal.begun(origin) as whole:
            if not whole:
                chunks = islice(read_chunks(sources.names), journal.chunks, None)
                _tell(running, chunks, journal, progress)
                _check_some(journal.report, data, seq_length)
                said = {**origin, "report": journal.report.as_dict() | {"notes": notes(options, journal.report)}}
                journal.put_together(token_dtype(opened.vocab_size), kind != "text", said)
            journal.publish()
    told = [*sources.notes(), *notes(options, journal.report)]
    if kind != "text" and opened.note is not None:
        told.append(opened.note)
    return Prepared(str(out), kind, journal.report, time.monotonic() - start_s, told)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tell(running: Workers, chunks: Iterator[Any], journal: Journal, progress: Progress) -> None:
    for piece in running.pieces(chunks):
        journal.add(piece)
        progress(journal.report)
    journal.flush()


def _kind_of_first(names: Sequence[str], on_error: OnError, columns: Mapping[str, str]) -> Kind:
    """The kind of the first record that has one.

    Raises:
        DataError: a record before it has none (``on_error="stop"``), or no record has.
    """
    for chunk in read_chunks(names):
        for record in chunk_records(chunk, on_error=on_error, columns=columns or None):
            if kinds := kinds_of(record):
                return kinds[0]
            if on_error == "stop":
                parse_record(record)  # tells what is wrong with it
                raise DataError(f"{record.where}: unknown kind of record. Say which with --kind.")
    raise DataError(f"{', '.join(names)}: no record of a known kind. Wanted text, chats, or chosen and rejected.")


def _origin(options: TokenizeOptions, tokenizer: Tokenizer, names: Sequence[str]) -> dict[str, Any]:
    """What the result depends on; it begins the manifest."""
    files = [(path, file_record(path, {})) for name in names for path in files_below(name)]
    told = asdict(options)
    return {
        "isthmus": isthmus.__version__,
        "kind": told.pop("kind"),
        "seq_length": told.pop("seq_length"),
        "loss_on": told.pop("loss_on"),
        "settings": told,
        "tokenizer": tokenizer_record(tokenizer),
        "files": [
            {"name": path, "bytes": record["stat"][1] if len(record["stat"]) > 1 else None, "digest": record["digest"]}
            for path, record in files
        ],
    }


def _check_some(report: TokenizeStats, data: Sequence[Path | str], seq_length: int | None) -> None:
    if not report.samples:
        reason = f" First: {report.skipped.reasons[0]}" if report.skipped.reasons else ""
        limit = "" if seq_length is None else f" (seq_length={seq_length})"
        raise DataError(f"{', '.join(map(str, data))}: nothing is left to learn from{limit}: {report.line()}.{reason}")
