"""Tokenizes data files into indexed files with a manifest, for ``isthmus prepare`` and for runs with raw data.

The output depends only on records, tokenizer and options, not on the number of processes or interruptions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import isthmus
from isthmus.data.chat.chat_records import Kind, kinds_of, parse_record
from isthmus.data.chat.chat_text import LossOn
from isthmus.data.chat.conversation_settings import UNCHANGED, ChatSettings
from isthmus.data.readers.chunks import OnError
from isthmus.data.readers.file_formats import check_columns, chunk_records, read_chunks
from isthmus.data.readers.file_sources import DataFiles, find_sources, first_names
from isthmus.data.store.indexed_dataset import token_dtype
from isthmus.data.tokenize.record_kinds import RECORD_KINDS
from isthmus.data.tokenize.stats import Overlong, TokenizeStats
from isthmus.data.tokenize.tokenize_records import RecordTokenizer, TokenizeOptions, notes_on
from isthmus.errors import DataError, UsageError
from isthmus.files.remote_files import is_url
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.platforms.cpu_threads import cores
from isthmus.recipes.data.clean_documents import (
    CleanOptions,
    Dedup,
    clean_shards,
    cleaned_shards,
    cleaning_note,
    read_documents,
)
from isthmus.recipes.data.data_sources import file_record, files_below, tokenizer_record
from isthmus.recipes.data.prepare_engines import Engine, EngineName, LocalEngine, OnProgress, RayEngine
from isthmus.recipes.data.prepare_resume import PartialOutput
from isthmus.recipes.data.prepare_shards import plan_shards
from isthmus.recipes.data.prepare_slurm import LEFT_OUT
from isthmus.recipes.data.prepare_workers import StartMethod
from isthmus.recipes.model.model_source import tokenizer_at


@dataclass(frozen=True, slots=True)
class InputPart:
    """Every ``count``-th shard, from number ``index`` on."""

    index: int
    count: int


@dataclass(frozen=True, slots=True)
class PrepareResult:
    out: str
    kind: Kind
    stats: TokenizeStats
    time_s: float

    def as_dict(self) -> dict[str, Any]:
        counts = self.stats.as_dict()
        notes, skipped, unused = counts.pop("notes"), counts.pop("skipped"), counts.pop("unused_fields")
        return {
            "out": self.out,
            "kind": self.kind,
            **counts,
            "skipped": skipped["count"],
            "skipped_first_reasons": skipped["first_reasons"],
            "unused_fields": unused,
            "time_s": self.time_s,
            "notes": notes,
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
    chat_template: str | None = None,
    chat: ChatSettings = UNCHANGED,
    on_error: OnError = "stop",
    columns: Mapping[str, str] | None = None,
    trust_remote_code: bool = False,
    on_progress: OnProgress = lambda stats: None,
    start_method: StartMethod | None = None,
    engine: EngineName = "local",
    part: InputPart | Literal["left-out"] | None = None,
    filters: Sequence[str] = (),
    dedup: Dedup | None = None,
) -> PrepareResult:
    """Tokenize data into ``OUT.bin``, ``OUT.idx``, ``OUT.json``, and ``OUT.mask.bin`` unless every token has loss.

    Args:
        data: files, folders, patterns, or ``hf:`` names.
        out: prefix of the output files, or its URL; they must not exist.
        tokenizer: folder, sentencepiece file, or Hub id.
        tokenizer_type: Megatron-LM's name of the expected type; None accepts any.
        kind: of the records; None: the kind of the first record.
        seq_length: samples of more than this + 1 tokens are cut or dropped; None: no limit. Not for text.
        workers: processes; None: one per core.
        loss_on: which tokens of a chat have loss.
        overlong: truncate, split (chats) or drop samples that are too long, or raise.
        chat_template: replaces that of the tokenizer, as ``chat.template`` of a run; not for text.
        chat: system prompt and reasoning, as the section ``chat`` of a run; not for text.
        on_error: stop at a bad record, or skip it.
        columns: known name -> name in the files.
        trust_remote_code: whether a tokenizer may run code from its folder.
        on_progress: called after each chunk.
        start_method: of the processes; None: the fastest safe one.
        engine: who tokenizes: processes of this machine, or tasks of a Ray cluster. ``slurm-array`` only records the
            inputs in ``OUT.partial``, for processes that make parts.
        part: make only the parts of these shards, and no output; None: all, and the output. With filters or
            deduplication, the first call for a part reads its texts, ``left-out`` then lists what is left out of all
            parts, and a second call makes the part.
        filters: names of filters of texts, by datatrove.
        dedup: leave out texts that others repeat, exactly or nearly, by datatrove; None: keep them.

    Raises:
        MissingInput, UsageError, DataError, UnsafeInput: data or tokenizer are missing or invalid, or no sample is left
        OutputExists, OutputInUse, NoSpace, IOFailure: the output exists or cannot be written.
        Hang: a worker process died; the next call reuses the finished parts.
    """
    start_s = time.monotonic()
    columns = dict(columns or {})
    check_columns(columns)
    files = find_sources(data)
    _check_prefix(out)
    prefix = str(out) if is_url(out) else Path(out).absolute()
    if part is None:
        PartialOutput(prefix).refuse_existing()
    opened = tokenizer_at(str(tokenizer), tokenizer_type, trust_remote_code=trust_remote_code)
    kind = kind or kind_of_first(files.names, on_error, columns)
    if RECORD_KINDS[kind].is_text:
        check_text_options(seq_length, has_chat_options=chat_template is not None or chat != UNCHANGED)
    opened.use_chat_template(chat_template)
    options = TokenizeOptions(kind, seq_length, loss_on, overlong, on_error, columns, chat)
    clean = CleanOptions(tuple(filters), dedup) if filters or dedup is not None else None
    if clean is not None:
        clean.check(options)
    elif part == LEFT_OUT:
        raise UsageError("--part left-out lists the texts that --filter and --dedup leave out. Name one of them.")
    made_by = RayEngine() if engine == "ray" else LocalEngine(workers, start_method)
    if engine == "slurm-array":
        record_inputs(files, prefix, opened, options, clean)
        stats = TokenizeStats()
    elif part is not None:
        stats = tokenize_part(files, prefix, opened, options, part, made_by, clean, on_progress)
    else:
        stats = tokenize_files(files, prefix, opened, options, engine=made_by, clean=clean, on_progress=on_progress)
    return PrepareResult(str(out), kind, stats, time.monotonic() - start_s)


def check_text_options(seq_length: int | None, *, has_chat_options: bool) -> None:
    if seq_length is not None:
        raise UsageError(
            f"--seq-length {seq_length}: text is not cut when it is prepared, but when a run reads it, to the "
            "seq_length of that run. Omit --seq-length."
        )
    if has_chat_options:
        raise UsageError(
            "--chat-template, --system and --reasoning are for chats, and these records are text. Omit them."
        )


def tokenize_files(
    files: DataFiles,
    prefix: Path | str,
    tokenizer: Tokenizer,
    options: TokenizeOptions,
    *,
    workers: int | None = None,
    method: StartMethod | None = None,
    engine: Engine | None = None,
    clean: CleanOptions | None = None,
    known_digests: Mapping[str, str] | None = None,
    on_progress: OnProgress = lambda stats: None,
) -> TokenizeStats:
    """Tokenize ``files`` into ``PREFIX.bin``, ``.idx``, ``.json`` and, with a mask, ``.mask.bin``.

    A text is a document of one sequence that ends with EOS; a conversation is a document of one sequence, or more if
    the chat template rewrites earlier turns; a preference pair is a document of two. Finished parts of an interrupted
    call in ``PREFIX.partial`` are reused; an exception of ``on_progress`` keeps them. Without an ``engine``, processes
    of this machine do the work.
    """
    engine = engine or LocalEngine(workers, method)
    output, is_text = PartialOutput(prefix), options.record_kind.is_text
    output.refuse_existing()
    record_tokenizer = RecordTokenizer(tokenizer, options)
    inputs, digests = _inputs(
        options, tokenizer, files.names, clean, {**output.known_digests(), **(known_digests or {})}
    )
    shards, cleaning = plan_shards(files.names, options.max_records), {}
    with output.opened(inputs, digests, shards) as complete, output.staging() as staging:
        if clean is not None and not complete:
            cleaned, report = clean_shards(shards, clean, options, f"{output.folder}/clean", engine.each)
            output.set_shards(cleaned)
            cleaning = {"cleaning": report}
        while not complete:
            if incomplete := output.incomplete:
                engine.complete(incomplete, record_tokenizer, _with_complete(output, on_progress))
            check_not_empty(output.stats, files.names, options)
            report = {**output.stats.as_dict(), "notes": notes_on(options, output.stats), **cleaning}
            dtype = token_dtype(tokenizer.vocab_size)
            complete = output.assemble(dtype, not is_text, {**inputs, "report": report}, staging)
        output.publish(staging)
    stats = output.stats
    stats.notes = [*files.notes(), *map(cleaning_note, cleaning.values()), *notes_on(options, stats)]
    if not is_text and tokenizer.note is not None:
        stats.notes.append(tokenizer.note)
    return stats


def _with_complete(output: PartialOutput, on_progress: OnProgress) -> OnProgress:
    """Add the counts of the complete shards."""
    done = TokenizeStats()
    for parts in output.shards:
        if parts.complete:
            done.add(parts.stats)

    def show(stats: TokenizeStats) -> None:
        total = TokenizeStats()
        total.add(done)
        total.add(stats)
        on_progress(total)

    return show


def record_inputs(
    files: DataFiles,
    prefix: Path | str,
    tokenizer: Tokenizer,
    options: TokenizeOptions,
    clean: CleanOptions | None = None,
) -> int:
    """Prepare the folder of the parts for processes that call :func:`tokenize_part`; returns the number of shards."""
    output = PartialOutput(prefix)
    output.refuse_existing()
    inputs, digests = _inputs(options, tokenizer, files.names, clean, output.known_digests())
    with output.opened(inputs, digests, plan_shards(files.names, options.max_records)):
        return len(output.shards)


def tokenize_part(
    files: DataFiles,
    prefix: Path | str,
    tokenizer: Tokenizer,
    options: TokenizeOptions,
    part: InputPart | Literal["left-out"],
    engine: Engine,
    clean: CleanOptions | None = None,
    on_progress: OnProgress = lambda stats: None,
) -> TokenizeStats:
    """Make the parts of the shards of ``part``, beside processes that make the others; returns their counts.

    With ``clean``, the first call for a part reads its documents, and ``left-out`` lists what is left out of all parts.
    """
    output, planned = PartialOutput(prefix), plan_shards(files.names, options.max_records)
    inputs, _ = _inputs(options, tokenizer, files.names, clean, output.known_digests())
    name = part if isinstance(part, str) else str(part.index)
    with output.joined(inputs, planned, name):
        if clean is not None:
            folder = f"{output.folder}/clean"
            if isinstance(part, str):
                clean_shards(planned, clean, options, folder, engine.each)
                return TokenizeStats(notes=["the texts that are left out are listed; the parts can be tokenized"])
            if (cleaned := cleaned_shards(planned, folder)) is None:
                numbered = list(enumerate(planned))[part.index :: part.count]
                read_documents(numbered, clean, options, folder, engine.each)
                return TokenizeStats(notes=["the texts of this part are filtered; nothing is tokenized yet"])
            output.set_shards(cleaned[0])
        assert not isinstance(part, str)
        shards = output.shards[part.index :: part.count]
        if incomplete := [parts for parts in shards if not parts.complete]:
            engine.complete(incomplete, RecordTokenizer(tokenizer, options), on_progress)
        stats = TokenizeStats()
        for parts in shards:
            stats.add(parts.stats)
    return stats


def _check_prefix(name: Path | str) -> None:
    out = Path(name)
    if out.name.endswith((".bin", ".idx", ".json")):
        raise UsageError(f"{name} must be a prefix; .bin, .idx and .json are appended to it. Omit the suffix.")
    if not is_url(name) and out.exists():
        hint = f"Name a prefix in it, such as {out}/text" if out.is_dir() else "Was the name of the output omitted"
        raise UsageError(
            f"{out} exists, but the last argument must be a prefix, to which .bin and .idx are appended. {hint}?"
        )


def kind_of_first(names: Sequence[str], on_error: OnError, columns: Mapping[str, str]) -> Kind:
    """The kind of the first record that has one."""
    for chunk in read_chunks(names):
        for record in chunk_records(chunk, on_error=on_error, columns=columns):
            if kinds := kinds_of(record):
                return kinds[0]
            if on_error == "stop":
                parse_record(record)  # raises with the reason
                raise DataError(f"{record.where}: unknown kind of record. Name the kind with --kind.")
    raise DataError(f"{first_names(names)}: no record of a known kind. Expected text, chats, or chosen and rejected.")


def _inputs(
    options: TokenizeOptions,
    tokenizer: Tokenizer,
    names: Sequence[str],
    clean: CleanOptions | None,
    known_digests: Mapping[str, str],
) -> tuple[dict[str, Any], dict[str, str]]:
    """(everything that the output depends on, the first keys of the manifest; digests by path, size and time)."""
    paths = [path for name in names for path in files_below(name)]
    with ThreadPoolExecutor(cores()) as pool:  # hashing is without the interpreter's lock
        records = list(pool.map(lambda path: file_record(path, known_digests), paths))
    settings = asdict(options)
    for name, unchanged in (("chat", UNCHANGED), ("max_records", None)):
        if getattr(options, name) == unchanged:
            del settings[name]
    inputs = {
        "isthmus": isthmus.__version__,
        "kind": settings.pop("kind"),
        "seq_length": settings.pop("seq_length"),
        "loss_on": settings.pop("loss_on"),
        "settings": settings,
        "tokenizer": tokenizer_record(tokenizer),
        "files": [
            {"name": path, "bytes": record["stat"][1] if len(record["stat"]) > 1 else None, "digest": record["digest"]}
            for path, record in zip(paths, records, strict=True)
        ],
        **({} if clean is None else {"cleaning": clean.as_record()}),
    }
    return inputs, {json.dumps(record["stat"]): record["digest"] for record in records}


def check_not_empty(stats: TokenizeStats, names: Sequence[str], options: TokenizeOptions) -> None:
    if not stats.samples:
        reason = f" First: {stats.skipped.reasons[0]}" if stats.skipped.reasons else ""
        limit = "" if options.seq_length is None else f" (seq_length={options.seq_length})"
        summary = stats.summary(RECORD_KINDS[options.kind])
        raise DataError(f"{first_names(names)}: no sample is left to train on{limit}: {summary}.{reason}")
