"""Filters and deduplication of texts before tokenization, by datatrove.

Each shard of the input is read once: its documents pass the filters, and datatrove writes their signatures. From the
signatures of all shards datatrove finds the duplicates. The result is a list of records for each shard, which the
tokenization leaves out; texts are not changed. All files are in ``OUT.partial/clean``. The steps may run in processes
of several machines.
"""

from __future__ import annotations

import io
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from isthmus.data.chat.chat_records import parse_document
from isthmus.data.readers.file_formats import rename_fields
from isthmus.data.tokenize.tokenize_records import TokenizeOptions
from isthmus.errors import DataError, UsageError, counted
from isthmus.extras import optional_package
from isthmus.files.remote_files import open_folder
from isthmus.recipes.data.prepare_shards import InputShard

Dedup = Literal["exact", "minhash"]
FILTERS: Mapping[str, str] = {
    "gopher-quality": "GopherQualityFilter",
    "gopher-repetition": "GopherRepetitionFilter",
    "fineweb-quality": "FineWebQualityFilter",
}
"""Name -> class of datatrove: those that neither change a text nor need a model or a list from the network."""
_DUPLICATES = "duplicates"
_REPORT = "report.json"
EachItem = Callable[[Callable[[Any], None], Sequence[Any]], None]
"""Calls a function for each item, in processes of an engine."""


@dataclass(frozen=True, slots=True)
class CleanOptions:
    filters: tuple[str, ...] = ()
    dedup: Dedup | None = None

    def check(self, options: TokenizeOptions) -> None:
        """UsageError for an unknown filter, records that are not texts, or a missing library."""
        for name in self.filters:
            if name not in FILTERS:
                raise UsageError(f"--filter {name} is not known. Use {', '.join(FILTERS)}.")
        if not options.record_kind.is_text:
            raise UsageError(
                f"--filter and --dedup are for texts: datatrove compares documents of one text, and these records are "
                f"of kind {options.kind}. Omit them, or prepare the data with --kind text."
            )
        _datatrove()

    def as_record(self) -> dict[str, Any]:
        return {"filters": list(self.filters), "dedup": self.dedup}


@dataclass(frozen=True, slots=True)
class _CleanShard:
    """The first step of the work: a shard of the input."""

    options: CleanOptions
    folder: str
    columns: Mapping[str, str]

    def __call__(self, item: tuple[int, InputShard]) -> None:
        number, shard = item
        files, name = open_folder(self.folder), f"{number:05d}.npz"
        if files.read(name) is not None:
            return
        documents = _Documents(self.options, shard, self.columns)
        if self.options.dedup is not None:
            _signature_step(self.options.dedup, self.folder).run(iter(documents), rank=number)
        else:
            for _ in documents:
                pass
        files.write(name, documents.content())


class _Documents:
    """The documents of a shard that pass the filters, and where they are."""

    def __init__(self, options: CleanOptions, shard: InputShard, columns: Mapping[str, str]) -> None:
        filters = _datatrove().pipeline.filters
        self._filters = [(name, getattr(filters, FILTERS[name])()) for name in options.filters]
        self._shard, self._columns = shard, columns
        self._places: list[tuple[int, int]] = []
        self._dropped: list[tuple[int, int]] = []
        self._reasons: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Any]:
        document = _datatrove().data.Document
        for chunk_number, chunk in enumerate(self._shard.chunks()):
            for index, item in enumerate(chunk.parse()):
                try:
                    if isinstance(item, DataError):
                        raise item
                    text = parse_document(rename_fields(item, self._columns) if self._columns else item)
                except DataError:  # the tokenization reports it
                    continue
                if not text.strip():
                    continue
                made = document(text, f"{chunk_number}/{index}")
                reason = next((name for name, step in self._filters if not _passes(step, made)), None)
                if reason is None:
                    self._places.append((chunk_number, index))
                    yield made
                else:
                    self._dropped.append((chunk_number, index))
                    self._reasons[reason] += 1

    def content(self) -> bytes:
        places, dropped = (np.array(rows, np.int64).reshape(-1, 2) for rows in (self._places, self._dropped))
        file = io.BytesIO()
        np.savez(file, places=places, dropped=dropped, reasons=np.array(json.dumps(self._reasons)))
        return file.getvalue()


def _passes(step: Any, document: Any) -> bool:
    result = step.filter(document)
    return bool(result[0] if isinstance(result, tuple) else result)


def clean_shards(
    shards: Sequence[InputShard], options: CleanOptions, tokenize: TokenizeOptions, folder: str, each: EachItem
) -> tuple[list[InputShard], dict[str, Any]]:
    """(the shards without the records that are left out, counts for the report). ``each`` runs the first step."""
    if (cleaned := cleaned_shards(shards, folder)) is None:
        read_documents(list(enumerate(shards)), options, tokenize, folder, each)
        list_left_out(len(shards), options, folder)
        cleaned = cleaned_shards(shards, folder)
        assert cleaned is not None
    return cleaned


def read_documents(
    shards: Sequence[tuple[int, InputShard]],
    options: CleanOptions,
    tokenize: TokenizeOptions,
    folder: str,
    each: EachItem,
) -> None:
    """The first step of these shards: the filters, and the signatures of the other documents."""
    each(_CleanShard(options, folder, tokenize.columns), shards)


def cleaned_shards(shards: Sequence[InputShard], folder: str) -> tuple[list[InputShard], dict[str, Any]] | None:
    """As :func:`clean_shards`, from the lists of an earlier call; None before :func:`list_left_out`."""
    report = open_folder(folder).read(_REPORT)
    if report is None:
        return None
    named = [replace(shard, dropped=(folder, _list_name(number))) for number, shard in enumerate(shards)]
    return named, json.loads(report)


def list_left_out(count: int, options: CleanOptions, folder: str) -> None:
    """Find the duplicates in ``count`` shards, and write the lists and counts of what is left out."""
    files = open_folder(folder)
    duplicates = _duplicates(options.dedup, folder) if options.dedup is not None else {}
    reasons: Counter[str] = Counter()
    documents = 0
    for number in range(count):
        with np.load(io.BytesIO(files.read(f"{number:05d}.npz") or b"")) as stored:
            places, dropped = stored["places"], stored["dropped"]
            reasons.update(json.loads(str(stored["reasons"])))
        documents += len(places) + len(dropped)
        removed = duplicates.get(number, np.empty(0, np.int64))
        reasons[_DUPLICATES] += len(removed)
        file = io.BytesIO()
        np.save(file, np.concatenate([dropped, places[removed]]))
        files.write(_list_name(number), file.getvalue())
    counts = {name: count for name, count in reasons.items() if count}
    report = {**options.as_record(), "documents": documents, "left_out": counts}
    files.write(_REPORT, json.dumps(report).encode())  # last: the lists are complete


def _list_name(number: int) -> str:
    return f"{number:05d}.dropped.npy"


def cleaning_note(report: Mapping[str, Any]) -> str:
    """One line for the user."""
    total = sum(report["left_out"].values())
    reasons = ", ".join(f"{count:,} {name}" for name, count in report["left_out"].items()) or "none"
    return f"{total:,} of {counted(report['documents'], 'document')} are left out: {reasons}"


def _duplicates(dedup: Dedup, folder: str) -> dict[int, Any]:
    """Shard -> documents that are duplicates of others, [n] ascending."""
    with redirect_stderr(io.StringIO()):  # progress bars
        pattern = _find_duplicates(dedup, folder)
    duplicates: dict[int, list[Any]] = defaultdict(list)
    system = _datatrove().io.get_datafolder(folder)
    for path in system.list_files(glob_pattern=pattern):
        number = int(path.rpartition("/")[2].partition(".")[0])
        with system.open(path, "rb") as file:
            duplicates[number].append(np.frombuffer(file.read(), "<u4"))
    return {number: np.sort(np.concatenate(parts)).astype(np.int64) for number, parts in duplicates.items()}


def _find_duplicates(dedup: Dedup, folder: str) -> str:
    """Compare the signatures of all shards; returns the pattern of the files with duplicates of a shard."""
    steps = _datatrove().pipeline.dedup
    if dedup == "exact":
        steps.ExactFindDedups(f"{folder}/signatures", f"{folder}/duplicates", _exact_config()).run()
        return "duplicates/*/*.c4_dup"
    config = _minhash_config()
    for bucket in range(config.num_buckets):
        step = steps.MinhashDedupBuckets(f"{folder}/signatures", f"{folder}/buckets", config=config)
        step.run(rank=bucket, world_size=config.num_buckets)
    steps.MinhashDedupCluster(f"{folder}/buckets", f"{folder}/duplicates", config=config).run()
    return "duplicates/*.remove"


def _signature_step(dedup: Dedup, folder: str) -> Any:
    steps = _datatrove().pipeline.dedup
    if dedup == "exact":
        return steps.ExactDedupSignature(f"{folder}/signatures", _exact_config())
    return steps.MinhashDedupSignature(f"{folder}/signatures", config=_minhash_config())


def _text(document: Any) -> str:
    text: str = document.text
    return text


def _hash_config() -> Any:
    # datatrove's other hash needs xxhash 3: version 4 takes no text.
    return _datatrove().utils.hashing.HashConfig(hash_fc="sha1")


def _exact_config() -> Any:
    return _datatrove().pipeline.dedup.ExactDedupConfig(_text, hash_config=_hash_config())


def _minhash_config() -> Any:
    return _datatrove().pipeline.dedup.MinhashConfig(hash_config=_hash_config())


def _datatrove() -> Any:
    with optional_package("isthmus prepare --filter or --dedup", "datatrove"):
        import datatrove.data
        import datatrove.io
        import datatrove.pipeline.dedup
        import datatrove.pipeline.filters
        import datatrove.utils.hashing
        import loguru
        import spacy  # noqa: F401 - datatrove cuts English words with it
    loguru.logger.disable("datatrove")
    return datatrove
