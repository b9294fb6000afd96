"""The safetensors format: header validation, byte ranges of tensor slices, and reading without memory-mapping.

A file is an 8-byte little-endian length, that many bytes of JSON, then the tensors without gaps.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from isthmus.errors import DataError, IOFailure
from isthmus.files.checked_files import ChecksumVerifier, ListedFile
from isthmus.files.file_checksums import BLOCK_BYTES
from isthmus.platforms.torch_features import FLOAT8_E8M0

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
if FLOAT8_E8M0 is not None:
    DTYPES["F8_E8M0"] = FLOAT8_E8M0
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000

Bounds = tuple[tuple[int, int], ...]
"""Start and stop of each dimension."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor in a file; ``offset`` is in bytes from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path, verifier: ChecksumVerifier) -> dict[str, TensorInfo]:
    """Tensors of a safetensors file by name, in file order; DataError if the file is truncated or malformed."""
    actual = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little") if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
        if length > _MAX_HEADER_BYTES or not length:
            raise DataError(f"{path} is not a safetensors file: no header length in its first 8 of {actual} bytes.")
        if 8 + length > actual:
            raise DataError(
                f"{path} is truncated: its header ends at byte {8 + length}, but the file has {actual} bytes."
            )
        raw = file.read(length)
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("not an object")
        header.pop("__metadata__", None)
        entries = {name: _entry(entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} has a malformed safetensors header: {error}. Download the file again.") from None
    tensors: dict[str, TensorInfo] = {}
    end = 0
    for name, (dtype, shape, (start, stop)) in sorted(entries.items(), key=lambda item: item[1][2]):
        info = TensorInfo(dtype, shape, path, 8 + length + start)
        if start != end or stop - start != info.nbytes:
            raise DataError(
                f"{path}: {name} has {info.nbytes} bytes and must start at byte {end}, "
                f"but its data_offsets are {start} to {stop}."
            )
        tensors[name], end = info, stop
    verifier.check(path, 0, 8 + length, tensor=_beside_header(tensors))
    if (expected := 8 + length + end) != actual:
        fault = "is truncated" if actual < expected else "has trailing bytes"
        raise DataError(f"{path} {fault}: expected {expected} bytes, the file has {actual}. Download the file again.")
    return tensors


def _beside_header(tensors: dict[str, TensorInfo]) -> str:
    """The tensors that may be in the same block of a list of checksums."""
    start = min((info.offset for info in tensors.values()), default=0)
    end = -(-start // BLOCK_BYTES) * BLOCK_BYTES
    names = [name for name, info in tensors.items() if info.offset < end]
    return " or ".join(["the header", *names[:4], *([f"{len(names) - 4} other tensors"] if len(names) > 4 else [])])


def encode_header(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """Length and header for tensors in this order, padded so that the data starts at a multiple of 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def bounds_of(shape: tuple[int, ...], index: tuple[slice, ...] | None) -> Bounds:
    """Resolve ``index`` (leading dimensions) within ``shape``; steps are ignored, see ``steps_of``."""
    index = index or ()
    if len(index) > len(shape):
        raise IndexError(f"{len(index)} slices for a tensor of {len(shape)} dimensions")
    cuts = [*index, *[slice(None)] * (len(shape) - len(index))]
    bounds = []
    for size, cut in zip(shape, cuts, strict=True):
        start, stop = cut.start or 0, size if cut.stop is None else cut.stop
        if (cut.step or 1) < 1 or not 0 <= start <= stop <= size:
            raise IndexError(f"{cut} is out of range for a dimension of size {size}")
        bounds.append((start, stop))
    return tuple(bounds)


def steps_of(index: tuple[slice, ...] | None) -> tuple[slice, ...] | None:
    """The steps of ``index``, relative to its bounds; None if all are 1."""
    if all(cut.step in (None, 1) for cut in index or ()):
        return None
    return tuple(slice(None, None, cut.step) for cut in index or ())


def byte_runs(shape: tuple[int, ...], bounds: Bounds, itemsize: int) -> Iterator[tuple[int, int]]:
    """``(offset, length)`` in bytes of the contiguous runs of a slice, in its row-major order."""
    inner, axis = itemsize, len(shape)
    while axis and bounds[axis - 1] == (0, shape[axis - 1]):
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield 0, inner
        return
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(axis)]
    low, high = bounds[axis - 1]
    for outer in itertools.product(*(range(start, stop) for start, stop in bounds[: axis - 1])):
        yield sum(i * stride for i, stride in zip(outer, strides, strict=False)) + low * inner, (high - low) * inner


def row_chunks(bounds: Bounds, itemsize: int, limit_bytes: int) -> Iterator[tuple[Bounds, slice]]:
    """Split a slice along its first dimension into chunks of about ``limit_bytes``: bounds, and rows of the slice."""
    if not bounds:
        yield bounds, slice(None)
        return
    (low, high), *rest = bounds
    row_bytes = math.prod(stop - start for start, stop in rest) * itemsize
    step = max(1, limit_bytes // max(1, row_bytes))
    for start in range(low, high, step):
        stop = min(high, start + step)
        yield ((start, stop), *rest), slice(start - low, stop - low)


class CastBuffer(threading.local):
    """A reusable buffer for casts, one per thread: fresh memory for each chunk costs ten times the copy."""

    limit_bytes = 4 << 20

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized contiguous tensor, valid until the next call."""
        size = math.prod(shape) * dtype.itemsize
        if size > self._buffer.numel():
            self._buffer = torch.empty(max(size, self.limit_bytes), dtype=torch.uint8)
        return self._buffer[:size].view(dtype).view(*shape)


def byte_view(tensor: Tensor) -> memoryview:
    """Bytes of a contiguous CPU tensor, without a copy."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _entry(entry: dict[str, Any]) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"torch {torch.__version__} has no dtype {entry['dtype']!r}")
    start, stop = entry["data_offsets"]
    shape = entry["shape"]
    if not all(type(number) is int and number >= 0 for number in [*shape, start, stop]):
        raise ValueError("shape or offset is not a non-negative integer")
    return DTYPES[entry["dtype"]], tuple(shape), (start, stop)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("duplicate tensor name")
    return unique


class TensorReader:
    """Opens files on first use; thread-safe."""

    def __init__(self, verifier: ChecksumVerifier | None = None) -> None:
        """``verifier`` checks what is read; the default is one of its own."""
        self._verifier = verifier or ChecksumVerifier()
        self._files: dict[Path, BinaryIO] = {}
        self._opening = threading.Lock()
        self._cast_buffer = CastBuffer()

    def read(
        self, info: TensorInfo, index: tuple[slice, ...] | None = None, *, into: Tensor | None = None, name: str = ""
    ) -> Tensor:
        """Read a slice of one tensor; only its bytes are read (with a step, also those between).

        The blocks with these bytes are checked, if the folder has checksums; ``name`` is for the message.

        With ``into`` (any dtype, device and strides; the shape of the slice) it is filled and returned, without an
        intermediate copy if it is a contiguous CPU tensor of the file's dtype.
        """
        bounds = bounds_of(info.shape, index)
        shape = tuple(stop - start for start, stop in bounds)
        if (steps := steps_of(index)) is not None:
            around = torch.empty(shape, dtype=info.dtype)
            self._fill(info, bounds, around, name)
            return around[steps] if into is None else into.detach().copy_(around[steps])
        target = torch.empty(shape, dtype=info.dtype) if into is None else into.detach()
        if tuple(target.shape) != shape:
            raise ValueError(f"{info.file}: a slice of shape {shape} does not fit into {tuple(target.shape)}")
        if target.dtype == info.dtype and target.device.type == "cpu" and target.is_contiguous():
            self._fill(info, bounds, target, name)
            return target
        buffer = self._cast_buffer
        for part, rows in row_chunks(bounds, info.dtype.itemsize, buffer.limit_bytes):
            chunk = buffer.take([stop - start for start, stop in part], info.dtype)
            self._fill(info, part, chunk, name)
            (target[rows] if part else target).copy_(chunk)
        return target

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        while self._files:
            self._files.popitem()[1].close()

    def __del__(self) -> None:
        self.close()

    def _descriptor(self, file: Path) -> int:
        with self._opening:
            if file not in self._files:
                self._files[file] = file.open("rb", buffering=0)
            return self._files[file].fileno()

    def _fill(self, info: TensorInfo, bounds: Bounds, target: Tensor, name: str) -> None:
        if not target.numel():
            return
        try:
            read_runs(self._descriptor(info.file), info, bounds, target, self._verifier.file(info.file), name)
        except OSError as error:
            raise IOFailure(f"{info.file} cannot be read: {error.strerror}.") from error


def read_runs(
    descriptor: int, info: TensorInfo, bounds: Bounds, target: Tensor, listed: ListedFile | None = None, name: str = ""
) -> None:
    """Read a slice into a contiguous CPU tensor, and check it; one call of the system reads less than 2 GiB."""
    view, done = byte_view(target), 0
    for offset, length in byte_runs(info.shape, bounds, info.dtype.itemsize):
        end = done + length
        while done < end:
            got = os.preadv(descriptor, [view[done:end]], info.offset + offset + length - (end - done))
            if not got:
                raise DataError(f"{info.file} was truncated while it was read. Download or write it again.")
            done += got
        if listed is not None:
            listed.check_read(info.offset + offset, view[end - length : end], name)
