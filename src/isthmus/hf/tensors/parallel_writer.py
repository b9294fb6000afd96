"""Writes safetensors files from many processes at once.

The layout is planned ahead, so every process knows the byte range of its slices and nothing is gathered.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isthmus.errors import disk_errors
from isthmus.files.file_checksums import WrittenBlocks
from isthmus.hf.tensors.finite import check_cast
from isthmus.hf.tensors.safetensors_format import (
    INDEX_FILE,
    SINGLE_FILE,
    Bounds,
    CastBuffer,
    TensorInfo,
    bounds_of,
    byte_runs,
    byte_view,
    encode_header,
    read_runs,
    row_chunks,
    steps_of,
)

if TYPE_CHECKING:
    from typing_extensions import Self

Spec = tuple[str, torch.dtype, tuple[int, ...]]
_HASHED_RUN_BYTES = 64 << 10
"""Shorter runs are hashed from the file, where they are parts of whole blocks."""
WRITEBACK_BYTES = 32 << 20
"""Writeback of a file starts after this many bytes; otherwise the disk idles until the final sync."""


class SafetensorsPlan:
    """File and byte offset of each tensor."""

    def __init__(self, tensors: Iterable[Spec], max_shard_bytes: float = 5e9) -> None:
        """Assign tensors (name, dtype, shape) to files of at most ``max_shard_bytes``, or of one larger tensor."""
        groups: list[list[Spec]] = []
        room = 0.0
        for name, dtype, shape in tensors:
            need = math.prod(shape) * dtype.itemsize
            if need > room or not groups:
                groups.append([])
                room = max_shard_bytes
            groups[-1].append((name, dtype, shape))
            room -= need
        self.headers: dict[str, bytes] = {}
        self.tensors: dict[str, TensorInfo] = {}
        """``file`` is relative to the folder."""
        self.file_bytes: dict[str, int] = {}
        for number, group in enumerate(groups, start=1):
            file = SINGLE_FILE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            # The order of the safetensors library: wide dtypes first, so that all tensors are aligned.
            group.sort(key=lambda spec: (-spec[1].itemsize, spec[0]))
            self.headers[file] = encode_header(group)
            offset = len(self.headers[file])
            for name, dtype, shape in group:
                self.tensors[name] = info = TensorInfo(dtype, tuple(shape), Path(file), offset)
                offset += info.nbytes
            self.file_bytes[file] = offset

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, without headers."""
        return sum(info.nbytes for info in self.tensors.values())

    def create(self, folder: Path) -> None:
        """Create the files with headers and reserved space, and the index. Called by one process."""
        with disk_errors(folder, sum(self.file_bytes.values())):
            for file, header in self.headers.items():
                descriptor = os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                try:
                    reserve(descriptor, self.file_bytes[file])
                    os.pwrite(descriptor, header, 0)
                finally:
                    os.close(descriptor)
            if len(self.headers) > 1:
                parameters = sum(math.prod(info.shape) for info in self.tensors.values())
                index = {
                    "metadata": {"total_parameters": parameters, "total_size": self.total_bytes},
                    "weight_map": {name: str(info.file) for name, info in self.tensors.items()},
                }
                (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


class TensorWriter:
    """Writes slices into existing files and syncs them on exit; thread-safe."""

    def __init__(self, folder: Path, written: WrittenBlocks | None = None) -> None:
        """``written`` gets the checksums of what is written."""
        self.folder = folder
        self.written: WrittenBlocks = written or WrittenBlocks()
        self._descriptors: dict[Path, int] = {}
        self._pending_bytes: dict[Path, int] = {}
        self._opening = threading.Lock()
        self._cast_buffer = CastBuffer()

    def write_at(self, info: TensorInfo, index: tuple[slice, ...] | None, tensor: Tensor, name: str = "") -> int:
        """Write ``tensor`` (any dtype, device and strides) as the slice ``index`` of ``info``; returns its bytes.

        UsageError with ``name`` if a finite value is beyond the range of the dtype in the file.

        A slice with steps is read, changed and written back; other threads must not write within its range meanwhile.
        """
        bounds = bounds_of(info.shape, index)
        shape = tuple(stop - start for start, stop in bounds)
        if (steps := steps_of(index)) is not None:
            around = self._around(info, bounds)
            around[steps] = cast = tensor.to(info.dtype)
            check_cast(name, cast, tensor)
            tensor = around
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{info.file}: a tensor of shape {tuple(tensor.shape)} is not a slice of shape {shape}")
        buffer = self._cast_buffer
        try:
            descriptor = self._descriptor(info.file)
            for part, rows in row_chunks(bounds, info.dtype.itemsize, buffer.limit_bytes):
                chunk = tensor[rows] if part else tensor
                if chunk.dtype != info.dtype or chunk.device.type != "cpu" or not chunk.is_contiguous():
                    values, chunk = chunk.detach(), buffer.take(chunk.shape, info.dtype)
                    check_cast(name, chunk.copy_(values), values)
                self._write_runs(descriptor, info, part, byte_view(chunk))
        except OSError:
            with disk_errors(self.folder / info.file):
                raise
        done = (tensor.numel() if steps is None else tensor[steps].numel()) * info.dtype.itemsize
        # Unsynchronized: the count only decides when writeback starts.
        self._pending_bytes[info.file] += done
        if self._pending_bytes[info.file] >= WRITEBACK_BYTES:
            self._pending_bytes[info.file] = 0
            start_writeback(descriptor)
        return done

    def _write_runs(self, descriptor: int, info: TensorInfo, part: Bounds, view: memoryview) -> None:
        name, start, stop, done = info.file.as_posix(), info.offset + info.nbytes, info.offset, 0
        for offset, length in byte_runs(info.shape, part, info.dtype.itemsize):
            run, at = view[done : done + length], info.offset + offset
            _write_all(descriptor, run, at)
            done += length
            if length >= _HASHED_RUN_BYTES or length == len(view):
                self.written.add(name, at, run)
            else:
                start, stop = min(start, at), max(stop, at + length)
        if start < stop:
            self.written.forget(name, start, stop)

    def close(self, *, sync: bool = True) -> None:
        while self._descriptors:
            file, descriptor = self._descriptors.popitem()
            with disk_errors(self.folder / file):
                try:
                    if sync:
                        os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Sync, except after an error."""
        self.close(sync=kind is None)

    def _around(self, info: TensorInfo, bounds: Bounds) -> Tensor:
        region = torch.empty([stop - start for start, stop in bounds], dtype=info.dtype)
        with disk_errors(self.folder / info.file):
            read_runs(self._descriptor(info.file), info, bounds, region)
        return region

    def _descriptor(self, file: Path) -> int:
        with self._opening:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(self.folder / file, os.O_RDWR)
                self._pending_bytes[file] = 0
            return self._descriptors[file]


class SafetensorsWriter(TensorWriter):
    """Writes slices into the files created by ``plan.create(folder)``."""

    def __init__(self, plan: SafetensorsPlan, folder: Path, written: WrittenBlocks | None = None) -> None:
        super().__init__(folder, written)
        self.plan = plan

    def write(self, name: str, index: tuple[slice, ...] | None, tensor: Tensor) -> int:
        return self.write_at(self.plan.tensors[name], index, tensor, name)


def reserve(descriptor: int, size: int) -> None:
    """Extend an open file to ``size``, with allocated blocks if the file system supports it."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except (AttributeError, OSError) as error:
        # Not on macOS, nor on every file system; there a full disk is detected only while writing.
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, size)


def start_writeback(descriptor: int) -> None:
    """Start writeback of an open file without waiting (Linux only)."""
    with contextlib.suppress(AttributeError):
        _LIBC.sync_file_range(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


_LIBC = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done
