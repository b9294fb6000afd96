"""Files to records, in two steps: chunks, which are cheap to come by, and the records in them, which cost more.

The content decides how a file is read, not its name; the name does only for text and tables, which have no mark:
``.txt``, ``.csv`` and ``.tsv``. A plain text file is one document as it stands: nothing in it says where another
would begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.data.readers.arrow_reader import parquet_chunks
from isthmus.data.readers.chunks import OnError as OnError
from isthmus.data.readers.chunks import Record as Record
from isthmus.data.readers.chunks import RecordChunk as RecordChunk
from isthmus.data.readers.chunks import SkippedRecords as SkippedRecords
from isthmus.data.readers.csv_reader import table_chunks
from isthmus.data.readers.decompress import is_compressed, open_decompressed, unpacked_name
from isthmus.data.readers.field_mapping import Columns as Columns
from isthmus.data.readers.field_mapping import renamed
from isthmus.data.readers.file_sources import find_sources
from isthmus.data.readers.hf_datasets import HUB, data_set_chunks
from isthmus.data.readers.json_chunks import array_chunks, decoded, line_chunks
from isthmus.errors import DataError


def read_records(
    path: Path | str,
    *,
    on_error: OnError = "stop",
    skipped: SkippedRecords | None = None,
    columns: Columns | None = None,
) -> Iterator[Record]:
    """Yield the records of one source in their order; the errors are those of the two functions that follow."""
    for chunk in read_chunks([path]):
        yield from chunk_records(chunk, on_error=on_error, skipped=skipped, columns=columns)


def read_chunks(files: Sequence[Path | str]) -> Iterator[RecordChunk]:
    """Cut sources into chunks, in their order: the same ones each time, as long as the files stay as they are.

    Memory does not grow with the size of the files; only a text file is read as a whole, where its chunk is parsed.

    Args:
        files: also folders, patterns and data sets, see ``isthmus.data.readers.file_sources``.

    Raises:
        MissingInput: there is no such file or data set.
        UsageError: there is no data file in a folder, or a library to read one is not installed.
        DataError: a file is empty, or broken in a way that leaves no sure place to go on from.
        IOFailure: reading failed.
    """
    for name in find_sources(files).names:
        if name.startswith(HUB) or Path(name).is_dir():
            yield from data_set_chunks(name)
        else:
            yield from _file_chunks(name)


def chunk_records(
    chunk: RecordChunk,
    *,
    on_error: OnError = "stop",
    skipped: SkippedRecords | None = None,
    columns: Columns | None = None,
) -> Iterator[Record]:
    """Yield the records of a chunk in their order.

    Args:
        chunk: may come from another process.
        on_error: what to do at a bad record: raise what is wrong, or note it in ``skipped``.
        skipped: where bad records are noted.
        columns: what the files call the fields that are known here.

    Raises:
        DataError: (``on_error="stop"``) a record is bad.
        MissingInput, IOFailure: a text file, which is read only here, cannot be.
    """
    skipped = skipped if skipped is not None else SkippedRecords()
    for item in chunk.parse():
        try:
            if isinstance(item, DataError):
                raise item
            record = renamed(item, columns) if columns else item
        except DataError as error:
            skipped.refuse(error, on_error)
        else:
            yield record


@dataclass(frozen=True, slots=True)
class TextFileChunk:
    """A whole text file: one document."""

    path: str

    def parse(self) -> Iterator[Record | DataError]:
        """One record with the key ``text``."""
        with open_decompressed(self.path) as file:
            raw = file.read()
        try:
            text = decoded(raw, self.path, 1)
        except DataError as error:
            yield error
            return
        if text.strip():
            yield Record({"text": text}, f"{self.path}:1")
        else:
            yield DataError(f"{self.path}: the file is empty. Wanted text.")


def _file_chunks(path: str) -> Iterator[RecordChunk]:
    with open_decompressed(path) as file:
        start = file.read(4096)
    name = unpacked_name(Path(path))
    first = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if name.endswith(".txt"):
        yield TextFileChunk(path)
    elif name.endswith(".parquet") or start.startswith(b"PAR1"):
        if is_compressed(path):
            raise DataError(f"{path}: a parquet file that is packed once more. Unpack it; parquet is packed in itself.")
        yield from parquet_chunks(path)
    elif not first:
        raise DataError(f"{path}: the file is empty. Wanted JSON records or text.")
    elif name.endswith((".csv", ".tsv")):
        yield from table_chunks(path, tabs=name.endswith(".tsv"))
    elif first == b"[":
        yield from array_chunks(path)
    elif first == b"{":
        yield from line_chunks(path)
    else:
        raise DataError(
            f"{path}:1: not JSON: begins with {first!r}. Wanted a JSON array of objects, one JSON object a line, "
            "parquet, a table in a file that ends in .csv or .tsv, or plain text in one that ends in .txt."
        )
