"""Rows of Arrow tables as records: parquet files and Hugging Face datasets.

A chunk contains its rows in Arrow IPC format; only the process that parses it creates Python objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from isthmus.data.readers.chunks import CHUNK_BYTES, Record
from isthmus.errors import DataError, IOFailure, MissingInput, UsageError

_MOST_ROWS = 4096
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ArrowChunk:
    """Rows as an Arrow IPC stream."""

    path: str
    first: int
    """Number of the first row, counted from 1."""
    raw: bytes

    def parse(self) -> Iterator[Record | DataError]:
        table = _pyarrow(self.path).ipc.open_stream(self.raw).read_all()
        for number, value in enumerate(table.to_pylist(), start=self.first):
            yield Record({name: _without_nulls(cell) for name, cell in value.items()}, f"{self.path}:{number}")


def parquet_chunks(path: str) -> Iterator[ArrowChunk]:
    """The rows of a parquet file; no row group is loaded as a whole."""
    library = _pyarrow(path)
    try:
        with library.parquet.ParquetFile(path, buffer_size=_READ_BYTES, pre_buffer=False) as file:
            groups = [file.metadata.row_group(k) for k in range(file.metadata.num_row_groups)]
            num_rows = file.metadata.num_rows
            size = sum(group.total_byte_size for group in groups)
            yield from row_chunks(path, file.iter_batches(batch_size=rows_at_once(num_rows, size)))
    except FileNotFoundError as error:
        raise MissingInput(f"{path}: no such data file.") from error
    except (library.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise IOFailure(f"{path}: cannot be read: {error.strerror or error}.") from error
        reason = " ".join(str(error).split()).rstrip(".")
        raise DataError(
            f"{path}: damaged or cut short, not a complete parquet file: {reason}. Download or create it again."
        ) from error


def row_chunks(path: str, batches: Iterable[Any]) -> Iterator[ArrowChunk]:
    """Chunks from Arrow record batches or tables; DataError without rows."""
    library = _pyarrow(path)
    first = 1
    for batch in batches:
        if not batch.num_rows:
            continue
        sink = library.BufferOutputStream()
        with library.ipc.new_stream(sink, batch.schema) as writer:
            writer.write(batch)
        yield ArrowChunk(path, first, sink.getvalue().to_pybytes())
        first += batch.num_rows
    if first == 1:
        raise DataError(f"{path}: the table has no rows. Expected at least one record.")


def rows_at_once(num_rows: int, num_bytes: int) -> int:
    """Rows per chunk, from their mean size."""
    return max(1, min(_MOST_ROWS, CHUNK_BYTES * num_rows // max(1, num_bytes)))


def _pyarrow(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(f"{path}: reading parquet needs pyarrow: pip install 'isthmus[data]'.") from error
    return pyarrow


def _without_nulls(cell: Any) -> Any:
    """Objects without null keys: Arrow gives all objects of a column the keys of any of them."""
    if isinstance(cell, dict):
        return {key: _without_nulls(value) for key, value in cell.items() if value is not None}
    return [_without_nulls(value) for value in cell] if isinstance(cell, list) else cell
