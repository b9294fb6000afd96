"""Reads and writes the index ``.metadata`` of a ``torch_dist`` checkpoint, a pickle of torch's ``Metadata``.

Reading runs no code that the pickle names. Neither direction has torch's objects of all parts in memory.
"""

from __future__ import annotations

import gc
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.serialization
from numpy.typing import NDArray
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from isthmus.engine.checkpoint.checkpoint_index import CheckpointIndex, Numbers, TensorParts
from isthmus.errors import DataError, UnsafeInput

INDEX = ".metadata"


class _Stored:
    """An object of the index with few fields, in their order: 32 bytes and their values."""

    __slots__ = ("values",)
    names: tuple[str, ...]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.values = tuple(map(state.get, self.names))

    def __hash__(self) -> int:
        return hash(self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stored) and self.values == other.values


class _Chunk(_Stored):
    __slots__ = ()
    names = ("offsets", "sizes")


class _Key(_Stored):
    __slots__ = ()
    names = ("fqn", "offset")


class _Info(_Stored):
    __slots__ = ()
    names = ("relative_path", "offset", "length")


def _packed(size: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(size)}q", *size)


def _memory_format(enumeration: Any, name: Any) -> metadata._MEM_FORMAT_ENCODING:
    """Member of the only enumeration of an index. Python 3.11.0 to 3.11.3 pickle a member as a call of ``getattr``."""
    if enumeration is not metadata._MEM_FORMAT_ENCODING or type(name) is not str:
        raise UnsafeInput("calls getattr for more than a memory format. Do not load this checkpoint.")
    return metadata._MEM_FORMAT_ENCODING[name]


_CLASSES: dict[tuple[str, str], Any] = {
    (metadata.__name__, name): getattr(metadata, name)
    for name in (
        "BytesStorageMetadata",
        "Metadata",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    (metadata.__name__, "ChunkStorageMetadata"): _Chunk,
    (metadata.__name__, "MetadataIndex"): _Key,
    (filesystem.__name__, "_StorageInfo"): _Info,
    ("torch", "Size"): _packed,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): Path,
    ("pathlib", "PurePosixPath"): Path,
    ("pathlib._local", "PosixPath"): Path,  # Python 3.13
    ("collections", "OrderedDict"): dict,
    ("builtins", "getattr"): _memory_format,
    ("__builtin__", "getattr"): _memory_format,  # pickle protocol 2
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _CLASSES:
            raise UnsafeInput(f"names {module}.{name}, which no index needs. Do not load this checkpoint.")
        return _CLASSES[module, name]


def read_index(folder: Path) -> CheckpointIndex:
    """The index of a checkpoint.

    Raises:
        UnsafeInput: it names a class or function that is not part of an index.
        DataError: it is damaged.
    """
    path = folder / INDEX
    try:
        with path.open("rb") as file, _without_collections():
            index = _IndexUnpickler(file).load()
            if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
                raise ValueError("it has no list of tensors")
            return _columns(index)
    except UnsafeInput as error:
        raise UnsafeInput(f"{path} {error}") from None
    except Exception as error:  # a damaged pickle raises almost any
        raise DataError(f"{path} cannot be read ({error}). Resume from another checkpoint.") from error


@contextmanager
def _without_collections() -> Iterator[None]:
    """Millions of new objects start collections, which find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _columns(index: Metadata) -> CheckpointIndex:
    stored: dict[Any, Any] = index.storage_data
    files: dict[str, int] = {}

    def place(name: str, offset: bytes | None) -> tuple[int, int, int]:
        key = _Key()
        key.values = (name, offset)
        path, start, length = stored[key].values
        if type(start) is not int or type(length) is not int or min(start, length) < 0:
            raise ValueError(f"the place of {name} is no number")
        return files.setdefault(path, len(files)), start, length

    result = CheckpointIndex()
    for name, entry in index.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            result.objects[name] = place(name, None)
            continue
        shape: Any = entry.size
        chunks: Any = entry.chunks
        dimensions = len(shape) // 8
        result.tensors[name] = TensorParts(
            entry.properties.dtype,
            struct.unpack(f"<{dimensions}q", shape),
            _unpacked([chunk.values[0] for chunk in chunks], dimensions),
            _unpacked([chunk.values[1] for chunk in chunks], dimensions),
            np.array([place(name, chunk.values[0]) for chunk in chunks], np.int64).reshape(-1, 3),
        )
        chunks.clear()
    result.files.extend(files)
    return result


def _unpacked(sizes: list[bytes], dimensions: int) -> Numbers:
    if any(len(size) != 8 * dimensions for size in sizes):
        raise ValueError("a part has another number of dimensions than its tensor")
    return np.frombuffer(b"".join(sizes), np.int64).reshape(len(sizes), dimensions)


def write_index(path: Path, index: CheckpointIndex, storage_meta: Any) -> None:
    """Write the index as torch does, and sync it; ``storage_meta`` is that of torch's writer."""
    with path.open("wb") as file:
        _IndexWriter(file).write(index, storage_meta)
        file.flush()
        os.fsync(file.fileno())


_ROWS = 1 << 14
"""Records that are made at a time."""
_FIRST_REFERENCE = 1 << 10
"""Pickles of single objects within the stream use the places of the memo before this one."""


class _IndexWriter:
    """Writes the opcodes of a pickle (protocol 2), those of parts as rows of an array of bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._references = file, dict[Any, int]()

    def write(self, index: CheckpointIndex, storage_meta: Any) -> None:
        self._file.write(pickle.PROTO + b"\x02")
        self._constant(Metadata)
        self._file.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK)
        parts: dict[str, Callable[[CheckpointIndex], None]] = {
            "state_dict_metadata": self._tensors,
            "storage_data": self._places,
        }
        values = {"storage_meta": storage_meta, "version": getattr(filesystem, "CURRENT_DCP_VERSION", None)}
        for name in (field.name for field in fields(Metadata)):
            self._constant(name)
            if name in parts:
                parts[name](index)
            else:
                self._constant(values.get(name))
        self._file.write(pickle.SETITEMS + pickle.BUILD + pickle.STOP)

    def _tensors(self, index: CheckpointIndex) -> None:
        self._file.write(pickle.EMPTY_DICT + pickle.MARK)
        for name, parts in index.tensors.items():
            # As dataclass of torch: its fields, of which one is the list of chunks.
            self._constant(name)
            self._constant(TensorStorageMetadata)
            self._file.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK)
            for field_name, value in {"properties": _properties(parts.dtype), "size": torch.Size(parts.shape)}.items():
                self._constant(field_name)
                self._constant(value)
            self._constant("chunks")
            self._file.write(pickle.EMPTY_LIST)
            offsets, sizes = self._reference("offsets"), self._reference("sizes")
            begin = self._reference(ChunkStorageMetadata) + _NEW
            for rows in _row_ranges(len(parts.places)):
                chunk = [begin, offsets, *self._size(parts.offsets[rows]), sizes, *self._size(parts.sizes[rows]), _SET]
                self._file.write(pickle.MARK + _records(rows, chunk) + pickle.APPENDS)
            self._file.write(pickle.SETITEMS + pickle.BUILD)
        for name in index.objects:
            self._constant(name)
            self._constant(BytesStorageMetadata())
        self._file.write(pickle.SETITEMS)

    def _places(self, index: CheckpointIndex) -> None:
        files = np.array([self._reference_number(name) for name in index.files], np.int64)
        self._file.write(pickle.EMPTY_DICT)
        for name, parts in index.tensors.items():
            offset, number = self._reference("offset"), self._reference("index")
            key = self._reference(MetadataIndex) + _NEW + self._reference("fqn") + self._reference(name)
            for rows in _row_ranges(len(parts.places)):
                hints = np.arange(rows.start, rows.stop)
                info = self._info(files, parts.places[rows])
                record = [key, offset, *self._size(parts.offsets[rows]), number, hints, _SET, *info]
                self._file.write(pickle.MARK + _records(rows, record) + pickle.SETITEMS)
        for name, place in index.objects.items():
            info = self._info(files, np.array([place], np.int64))
            self._file.write(pickle.MARK)
            self._constant(MetadataIndex(name))
            self._file.write(_records(slice(0, 1), info) + pickle.SETITEMS)

    def _info(self, files: Numbers, places: Numbers) -> list[bytes | NDArray[Any]]:
        begin = self._reference(filesystem._StorageInfo) + _NEW + self._reference("relative_path") + pickle.LONG_BINGET
        offset, length = self._reference("offset"), self._reference("length")
        return [begin, files[places[:, 0]].astype("<u4"), offset, places[:, 1], length, places[:, 2], _SET]

    def _size(self, values: Numbers) -> list[bytes | NDArray[Any]]:
        """A ``torch.Size`` per row."""
        begin = self._reference(torch.Size) + pickle.MARK
        return [begin, *values.T, pickle.TUPLE + pickle.TUPLE1 + pickle.REDUCE]

    def _constant(self, value: Any) -> None:
        self._file.write(pickle.dumps(value, protocol=2)[2:-1])  # without PROTO and STOP

    def _reference(self, value: Any) -> bytes:
        """Opcodes that push ``value``, which is in the memo."""
        return pickle.LONG_BINGET + struct.pack("<I", self._reference_number(value))

    def _reference_number(self, value: Any) -> int:
        if value not in self._references:
            number = self._references[value] = _FIRST_REFERENCE + len(self._references)
            self._constant(value)
            self._file.write(pickle.LONG_BINPUT + struct.pack("<I", number) + pickle.POP)
        return self._references[value]


_NEW = pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK
_SET = pickle.SETITEMS + pickle.BUILD


def _properties(dtype: torch.dtype) -> TensorProperties:
    return TensorProperties(dtype=dtype)


def _row_ranges(count: int) -> Iterator[slice]:
    for start in range(0, count, _ROWS):
        yield slice(start, min(start + _ROWS, count))


def _records(rows: slice, fields_: list[bytes | NDArray[Any]]) -> bytes:
    """The concatenation of the fields of each row: constant bytes, integers with their opcode, or raw ``u4``."""
    count = rows.stop - rows.start
    columns: list[NDArray[np.uint8]] = []
    for value in fields_:
        if isinstance(value, bytes):
            columns.append(np.broadcast_to(np.frombuffer(value, np.uint8), (count, len(value))))
        elif value.dtype == np.dtype("<u4"):
            columns.append(np.ascontiguousarray(value).view(np.uint8).reshape(count, 4))
        else:
            fits = not count or int(value.max()) < 1 << 31
            columns.append(np.broadcast_to(np.frombuffer(b"J" if fits else b"\x8a\x08", np.uint8), (count, 2 - fits)))
            numbers = np.ascontiguousarray(value, "<i4" if fits else "<i8")
            columns.append(numbers.view(np.uint8).reshape(count, -1))
    return np.concatenate(columns, axis=1).tobytes()
