"""Rows of Arrow tables as records: parquet files and Hugging Face datasets.

A chunk contains its rows in Arrow IPC format; only the process that parses it creates Python objects. A dataset is a
folder written by ``save_to_disk``, or on the Hub: ``hf:org/name``, ``hf:org/name:split``, or
``hf:org/name/configuration:split``; the default split is ``train``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from isthmus.data.readers.chunks import CHUNK_BYTES, RECORD_BYTES, Record, expands_too_much, expansion_limit, too_large
from isthmus.data.readers.data_names import HUB, is_hub_name
from isthmus.errors import DataError, IOFailure, IsthmusError, MissingInput, UsageError
from isthmus.extras import optional_package
from isthmus.files.remote_files import file_bytes, is_url, open_binary

METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files of a dataset without records."""
_MOST_ROWS = 4096
_READ_BYTES = 1 << 20
_SMALL_FILE, _SHORT_TEXT = 4 << 20, 64
"""Bytes of a file, and of a mean text: below them, dictionaries are expanded here, which is slower than by Arrow."""
_ELEMENT_BYTES = 8
"""Bytes of a number or an offset in a list, which a file can store in less than a bit."""


@dataclass(frozen=True, slots=True)
class ArrowChunk:
    """Rows as an Arrow IPC stream."""

    path: str
    first: int
    """Number of the first row, counted from 1."""
    raw: bytes

    def parse(self) -> Iterator[Record | DataError]:
        library = _pyarrow(self.path)
        try:
            rows = library.ipc.open_stream(self.raw).read_all().to_pylist()
        except Exception as error:  # of Arrow or Python, for text that is not UTF-8, or a date that no calendar has
            raise DataError(f"{self.path}:{self.first}: a row cannot be read: {_sentence(error)}") from error
        for number, value in enumerate(rows, start=self.first):
            yield Record({name: _without_nulls(cell) for name, cell in value.items()}, f"{self.path}:{number}")


def parquet_chunks(path: str) -> Iterator[ArrowChunk]:
    """The rows of a parquet file; no row group is loaded as a whole.

    Raises UnsafeInput if the file expands beyond all measure.
    """
    library = _pyarrow(path)
    try:
        metadata = library.parquet.read_metadata(_opened(path))
        groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
        limit, size = expansion_limit(path), sum(group.total_byte_size for group in groups)
        rows = rows_at_once(metadata.num_rows, size)
        is_small = file_bytes(path) <= _SMALL_FILE
        dictionaries: set[str] = set()
        prefixed: set[str] = set()
        for number in range(metadata.num_columns):
            is_list = metadata.schema.column(number).max_repetition_level > 0
            for column in (group.column(number) for group in groups):
                size += _ELEMENT_BYTES * column.num_values * is_list
                is_cheap = is_small or column.total_uncompressed_size < _SHORT_TEXT * column.num_values
                if column.physical_type == "BYTE_ARRAY" and any("DICTIONARY" in name for name in column.encodings):
                    dictionaries |= {column.path_in_schema} if is_cheap else set()
                if any(name.startswith("DELTA") for name in column.encodings):
                    prefixed.add(column.path_in_schema)  # each text may have a part of the one before it
                    rows = min(rows, max(1, limit // max(1, column.total_uncompressed_size)))
        if size > limit:
            raise expands_too_much(path)
        texts = sorted(dictionaries - prefixed)  # a dictionary is small until it is expanded
        options = {"buffer_size": _READ_BYTES, "pre_buffer": False, "read_dictionary": texts}
        with library.parquet.ParquetFile(_opened(path), **options) as file:
            # Arrow does not read lists from two dictionaries, which row groups have, into one batch.
            batches = (file.iter_batches(batch_size=rows, row_groups=[group]) for group in range(len(groups)))
            yield from row_chunks(path, _expanded(path, chain.from_iterable(batches), limit))
    except FileNotFoundError as error:
        raise MissingInput(f"{path}: no such data file.") from error
    except (library.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise IOFailure(f"{path}: cannot be read: {error.strerror or error}.") from error
        reason = " ".join(str(error).split()).rstrip(".")
        raise DataError(
            f"{path}: damaged or truncated, not a complete parquet file: {reason}. Download or create it again."
        ) from error


def _expanded(path: str, batches: Iterable[Any], limit: int) -> Iterator[Any]:
    """Batches with texts in place of dictionaries; UnsafeInput before they have more than ``limit`` bytes in total."""
    library = _pyarrow(path)
    for batch in batches:
        batch.validate(full=True)
        sizes = [_expanded_bytes(library, column) for column in batch.columns]
        limit -= sum(sizes)
        if limit < 0:
            raise expands_too_much(path)
        if sum(sizes) > RECORD_BYTES * min(batch.num_rows, 16):
            raise too_large(f"{path}: one of {batch.num_rows} rows")
        fields = [field.with_type(_expanded_type(library, field.type)) for field in batch.schema]
        table = library.Table.from_batches([batch])
        yield from table.cast(library.schema(fields)).combine_chunks().to_batches()


def _expanded_bytes(library: Any, array: Any) -> int:
    kinds = library.types
    if kinds.is_dictionary(array.type):
        if kinds.is_primitive(array.type.value_type):
            return int(array.nbytes)
        lengths = library.compute.binary_length(array.dictionary)
        return library.compute.sum(library.compute.take(lengths, array.indices)).as_py() or 0
    if kinds.is_struct(array.type):
        return sum(_expanded_bytes(library, field) for field in array.flatten())
    if kinds.is_map(array.type):
        return _expanded_bytes(library, array.keys) + _expanded_bytes(library, array.items)
    if kinds.is_nested(array.type):
        return _expanded_bytes(library, array.flatten())
    return int(array.nbytes)


def _expanded_type(library: Any, kind: Any) -> Any:
    kinds = library.types
    if kinds.is_dictionary(kind):
        return kind.value_type
    if kinds.is_struct(kind):
        return library.struct([field.with_type(_expanded_type(library, field.type)) for field in kind])
    if kinds.is_map(kind):
        return library.map_(_expanded_type(library, kind.key_type), _expanded_type(library, kind.item_type))
    if kinds.is_large_list(kind):
        return library.large_list(kind.value_field.with_type(_expanded_type(library, kind.value_type)))
    if kinds.is_list(kind):
        return library.list_(kind.value_field.with_type(_expanded_type(library, kind.value_type)))
    return kind


def row_chunks(path: str, batches: Iterable[Any]) -> Iterator[ArrowChunk]:
    """Chunks from Arrow record batches or tables; DataError without rows, an error of Arrow for a damaged batch."""
    library = _pyarrow(path)
    first = 1
    for batch in batches:
        batch.validate(full=True)  # offsets beyond the data would end the process
        if not batch.num_rows:
            continue
        if batch.nbytes > RECORD_BYTES * min(batch.num_rows, 16):
            raise too_large(f"{path}:{first}")
        sink = library.BufferOutputStream()
        with library.ipc.new_stream(sink, batch.schema) as writer:
            writer.write(batch)
        yield ArrowChunk(path, first, sink.getvalue().to_pybytes())
        first += batch.num_rows
    if first == 1:
        raise DataError(f"{path}: the table has no rows. Expected at least one record.")


def count_rows(name: str) -> int:
    """Rows of a parquet file, or of a dataset on the disk."""
    if Path(name).is_dir():
        return len(_from_disk(_library(name), name))
    return int(_pyarrow(name).parquet.read_metadata(_opened(name)).num_rows)


def _opened(path: str) -> Any:
    """What pyarrow reads: a path, or the file at a URL."""
    return open_binary(path) if is_url(path) else path


def rows_at_once(num_rows: int, num_bytes: int) -> int:
    """Rows per chunk, from their mean size."""
    return max(1, min(_MOST_ROWS, CHUNK_BYTES * num_rows // max(1, num_bytes)))


def _pyarrow(path: str) -> Any:
    with optional_package(f"{path}: reading parquet", "pyarrow"):
        import pyarrow
        import pyarrow.compute
        import pyarrow.ipc
        import pyarrow.parquet
    return pyarrow


def _without_nulls(cell: Any) -> Any:
    """Objects without null keys: Arrow gives all objects of a column the keys of any of them."""
    if isinstance(cell, dict):
        return {key: _without_nulls(value) for key, value in cell.items() if value is not None}
    return [_without_nulls(value) for value in cell] if isinstance(cell, list) else cell


def is_dataset(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote this folder, with one or several splits."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def check_name(name: str) -> None:
    path, configuration, split = _parts(name)
    if not all(path.split("/")) or configuration == "" or split == "":
        raise UsageError(
            f"{name}: not the name of a data set. Expected hf:ORG/NAME, hf:ORG/NAME:SPLIT or hf:ORG/NAME/CONFIG:SPLIT."
        )


def dataset_chunks(name: str) -> Iterator[ArrowChunk]:
    """The rows of a dataset; a Hub dataset is downloaded into the cache of ``datasets``."""
    library = _library(name)
    dataset = _from_hub(library, name) if is_hub_name(name) else _from_disk(library, name)
    try:
        dataset.data.table.validate()  # the sizes of buffers; row_chunks validates their content
        size = rows_at_once(len(dataset), dataset.data.nbytes)
        yield from row_chunks(name, dataset.with_format("arrow").iter(batch_size=size))
    except IsthmusError:
        raise
    except Exception as error:  # of Arrow or datasets
        raise DataError(f"{name}: damaged data set: {_sentence(error)} Write it again with save_to_disk.") from error


def _from_disk(library: Any, name: str) -> Any:
    try:
        dataset = library.load_from_disk(name)
    except Exception as error:  # of Arrow, JSON or datasets
        raise DataError(
            f"{name}: damaged or incomplete data set: {_sentence(error)} Write it again with save_to_disk."
        ) from error
    if isinstance(dataset, dict):
        splits = list(dataset)
        if "train" not in dataset and len(splits) > 1:
            raise UsageError(f"{name}: has the splits {', '.join(splits)}. Name the folder of one of them.")
        return dataset["train" if "train" in dataset else splits[0]]
    return dataset


def _from_hub(library: Any, name: str) -> Any:
    path, configuration, split = _parts(name)
    try:
        return library.load_dataset(path, configuration, split=split or "train")
    except library.exceptions.DatasetNotFoundError as error:
        raise MissingInput(
            f"{name}: no such data set on the Hugging Face Hub, or it is private or gated: {_sentence(error)} "
            "Check the name; for a gated one request access on its page, then log in: hf auth login, or HF_TOKEN."
        ) from error
    except ConnectionError as error:
        raise MissingInput(
            f"{name}: there is no local file or folder {path}, it is not in the cache of data sets, and the Hugging "
            f"Face Hub does not answer: {_sentence(error)} Check the path or the network. Without a network, download "
            "it elsewhere, save it with save_to_disk and name the folder."
        ) from error
    except ValueError as error:  # an unknown split, or a choice of configurations
        raise UsageError(f"{name}: {_sentence(error)}") from error
    except Exception as error:  # of datasets or its HTTP library, which differs by version
        raise IOFailure(f"{name}: cannot be downloaded from the Hugging Face Hub: {_sentence(error)}") from error


def _parts(name: str) -> tuple[str, str | None, str | None]:
    """Repository, configuration and split."""
    path, colon, split = name.removeprefix(HUB).partition(":")
    owner, *rest = path.split("/", 2)
    return "/".join([owner, *rest[:1]]), rest[1] if len(rest) > 1 else None, split if colon else None


def _library(name: str) -> Any:
    with optional_package(f"{name}: reading a data set", "datasets"):
        import datasets
    datasets.disable_progress_bars()
    return datasets


def _sentence(error: Exception) -> str:
    line = " ".join(str(error).split()) or type(error).__name__
    return line if line.endswith((".", "!", "?")) else f"{line}."
