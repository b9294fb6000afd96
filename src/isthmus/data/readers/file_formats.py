"""Files to records in two steps: cut chunks, which is cheap, and parse the records of each chunk.

The format is detected from the content, except text and tables: ``.txt``, ``.csv`` and ``.tsv``. A plain text file is
one document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from isthmus.data.readers.arrow_reader import dataset_chunks, parquet_chunks
from isthmus.data.readers.chunks import OnError, Record, RecordChunk, SkippedRecords
from isthmus.data.readers.csv_reader import table_chunks
from isthmus.data.readers.data_names import FIELDS, is_hub_name, uncompressed_name
from isthmus.data.readers.decompress import is_compressed, open_decompressed
from isthmus.data.readers.file_sources import find_sources
from isthmus.data.readers.json_chunks import array_chunks, decode_utf8, line_chunks, wraps_records
from isthmus.errors import DataError, UsageError

Columns = Mapping[str, str]
"""Known name -> name in the files."""


def read_chunks(files: Sequence[Path | str]) -> Iterator[RecordChunk]:
    """Cut sources (see ``isthmus.data.readers.file_sources``) into chunks; deterministic for unchanged files.

    Memory does not grow with file sizes; only a text file is read as a whole, when its chunk is parsed.
    """
    for name in find_sources(files).names:
        if is_hub_name(name) or Path(name).is_dir():
            yield from dataset_chunks(name)
        else:
            yield from _file_chunks(name)


def chunk_records(
    chunk: RecordChunk,
    *,
    on_error: OnError = "stop",
    skipped: SkippedRecords | None = None,
    columns: Columns | None = None,
) -> Iterator[Record]:
    """The records of a chunk; bad records raise, or with ``on_error="skip"`` are counted in ``skipped``."""
    skipped = skipped if skipped is not None else SkippedRecords()
    for item in chunk.parse():
        try:
            if isinstance(item, DataError):
                raise item
            record = rename_fields(item, columns) if columns else item
        except DataError as error:
            skipped.skip_or_raise(error, on_error)
        else:
            yield record


@dataclass(frozen=True, slots=True)
class TextFileChunk:
    """A whole text file: one document."""

    path: str

    def parse(self) -> Iterator[Record | DataError]:
        with open_decompressed(self.path) as file:
            raw = file.read()
        try:
            text = decode_utf8(raw, self.path, 1)
        except DataError as error:
            yield error
            return
        if text.strip():
            yield Record({"text": text}, f"{self.path}:1")
        else:
            yield DataError(f"{self.path}: the file is empty. Expected text.")


def _file_chunks(path: str) -> Iterator[RecordChunk]:
    with open_decompressed(path) as file:
        start = file.read(4096)
        first = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        while not first and (more := file.read(1 << 16)):
            first = more.lstrip()[:1]
    name = uncompressed_name(Path(path))
    if name.endswith(".txt"):
        yield TextFileChunk(path)
    elif name.endswith(".parquet") or start.startswith(b"PAR1"):
        if is_compressed(path):
            raise DataError(f"{path}: a compressed parquet file. Decompress it; parquet compresses its own content.")
        yield from parquet_chunks(path)
    elif not first:
        raise DataError(f"{path}: the file is empty. Expected JSON records or text.")
    elif name.endswith((".csv", ".tsv")):
        yield from table_chunks(path, tabs=name.endswith(".tsv"))
    elif first == b"[":
        yield from array_chunks(path)
    elif first == b"{":
        yield from array_chunks(path, wrapped=True) if wraps_records(path) else line_chunks(path)
    else:
        raise DataError(
            f"{path}:1: not JSON: begins with {first!r}. Expected a JSON array of objects, one JSON object per line, "
            "parquet, a table in a file that ends in .csv or .tsv, or plain text in a file that ends in .txt."
        )


def check_columns(columns: Columns) -> None:
    for known, source in columns.items():
        if known not in FIELDS:
            near = get_close_matches(known, FIELDS, n=1) or (source in FIELDS and [f"{source}: {known}"])
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UsageError(f"data.columns: {known} is not a known field.{hint} Known: {', '.join(FIELDS)}.")


def rename_fields(record: Record, columns: Columns) -> Record:
    """Other fields are unchanged; DataError if a field of ``columns`` is missing."""
    for known, source in columns.items():
        if source not in record.value:
            near = get_close_matches(source, map(str, record.value), n=1)
            fields = ", ".join(map(str, record.value)) or "none"
            hint = f"Did you mean {known}: {near[0]}?" if near else f"Its fields: {fields}."
            raise DataError(f"{record.where}: no field {source}, which data.columns names for {known}. {hint}")
    rest = {name: cell for name, cell in record.value.items() if name not in columns.values()}
    return Record(rest | {known: record.value[source] for known, source in columns.items()}, record.where)
