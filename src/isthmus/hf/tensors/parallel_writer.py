"""Writes safetensors files by many processes at once: the layout is planned ahead, each writes its slices in place.

No process gathers anything, and none waits for another: the byte range of every slice follows from the plan alone.
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
from typing import Self

import torch
from torch import Tensor

from isthmus.errors import disk_errors
from isthmus.hf.model_folder import INDEX_FILE, SINGLE_FILE
from isthmus.hf.tensors.safetensors_format import (
    Bounds,
    Stage,
    TensorInfo,
    bounds_of,
    byte_runs,
    byte_view,
    encode_header,
    row_chunks,
    steps_of,
)

Spec = tuple[str, torch.dtype, tuple[int, ...]]
UNWRITTEN_BYTES = 32 << 20
"""What a file collects in memory before the disk is told to begin with it: else it idles until the sync at the end."""


class SafetensorsPlan:
    """Which tensor lies in which file at which byte."""

    def __init__(self, tensors: Iterable[Spec], max_shard_bytes: float = 5e9) -> None:
        """Lay the tensors (name, dtype, shape) out in files of at most ``max_shard_bytes``, one tensor at least."""
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
        """Header of each file."""
        self.tensors: dict[str, TensorInfo] = {}
        """All tensors; their ``file`` is relative to the folder."""
        self.file_bytes: dict[str, int] = {}
        for number, group in enumerate(groups, start=1):
            file = SINGLE_FILE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            # The order that the safetensors library itself writes: wide dtypes first, which keeps all of them aligned.
            group.sort(key=lambda spec: (-spec[1].itemsize, spec[0]))
            self.headers[file] = encode_header(group)
            offset = len(self.headers[file])
            for name, dtype, shape in group:
                self.tensors[name] = info = TensorInfo(dtype, tuple(shape), Path(file), offset)
                offset += info.nbytes
            self.file_bytes[file] = offset

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, headers not counted: what the writers together have to write."""
        return sum(info.nbytes for info in self.tensors.values())

    def create(self, folder: Path) -> None:
        """Make the files with their headers and the index, with the space for all tensors reserved. One process does.

        Raises:
            NoSpace: the disk has no room for all of it.
            IOFailure: the files cannot be made.
        """
        with disk_errors(folder, sum(self.file_bytes.values())):
            for file, header in self.headers.items():
                descriptor = os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                try:
                    reserve(descriptor, self.file_bytes[file])
                    os.pwrite(descriptor, header, 0)
                finally:
                    os.close(descriptor)
            if len(self.headers) > 1:
                (folder / INDEX_FILE).write_text(json.dumps(self._index(), indent=2, sort_keys=True) + "\n")

    def _index(self) -> dict[str, object]:
        parameters = sum(math.prod(info.shape) for info in self.tensors.values())
        return {
            "metadata": {"total_parameters": parameters, "total_size": self.total_bytes},
            "weight_map": {name: str(info.file) for name, info in self.tensors.items()},
        }


class TensorWriter:
    """Writes slices into existing files; a context manager that syncs them at its end. Several threads may write."""

    def __init__(self, folder: Path) -> None:
        """Open nothing yet: files are opened as slices fall into them."""
        self.folder = folder
        self._descriptors: dict[Path, int] = {}
        self._unwritten: dict[Path, int] = {}
        self._opening = threading.Lock()
        self._stage = Stage()

    def write_at(self, info: TensorInfo, index: tuple[slice, ...] | None, tensor: Tensor) -> int:
        """Write ``tensor`` (any dtype, device and strides) as the slice ``index`` of ``info``; return its bytes there.

        A slice with steps is laid into what lies around it; let no other thread write between its steps.

        Raises:
            NoSpace: the disk is full after all.
            IOFailure: writing failed.
        """
        bounds = bounds_of(info.shape, index)
        shape = tuple(stop - start for start, stop in bounds)
        if (steps := steps_of(index)) is not None:
            around = self._around(info, bounds)
            around[steps] = tensor.to(info.dtype)
            tensor = around
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{info.file}: a tensor of shape {tuple(tensor.shape)} is not a slice of shape {shape}")
        stage = self._stage
        try:
            descriptor = self._descriptor(info.file)
            for part, rows in row_chunks(bounds, info.dtype.itemsize, stage.limit_bytes):
                chunk = tensor[rows] if part else tensor
                if chunk.dtype != info.dtype or chunk.device.type != "cpu" or not chunk.is_contiguous():
                    chunk = stage.take(chunk.shape, info.dtype).copy_(chunk.detach())
                view, done = byte_view(chunk), 0
                for offset, length in byte_runs(info.shape, part, info.dtype.itemsize):
                    _write_all(descriptor, view[done : done + length], info.offset + offset)
                    done += length
        except OSError:
            with disk_errors(self.folder / info.file):
                raise
        done = (tensor.numel() if steps is None else tensor[steps].numel()) * info.dtype.itemsize
        # Threads may overwrite each other's count: it only decides when the disk begins.
        self._unwritten[info.file] += done
        if self._unwritten[info.file] >= UNWRITTEN_BYTES:
            self._unwritten[info.file] = 0
            begin_writing(descriptor)
        return done

    def close(self, *, sync: bool = True) -> None:
        """Close the files, on disk if ``sync``.

        Raises:
            NoSpace: the disk turned out to be full.
            IOFailure: syncing failed.
        """
        while self._descriptors:
            file, descriptor = self._descriptors.popitem()
            with disk_errors(self.folder / file):
                try:
                    if sync:
                        os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close, and sync unless after an error."""
        self.close(sync=kind is None)

    def _around(self, info: TensorInfo, bounds: Bounds) -> Tensor:
        found = torch.empty([stop - start for start, stop in bounds], dtype=info.dtype)
        view, done = byte_view(found), 0
        with disk_errors(self.folder / info.file):
            descriptor = self._descriptor(info.file)
            for offset, length in byte_runs(info.shape, bounds, info.dtype.itemsize):
                if os.preadv(descriptor, [view[done : done + length]], info.offset + offset) < length:
                    raise OSError(errno.EIO, "it became shorter while it was written")
                done += length
        return found

    def _descriptor(self, file: Path) -> int:
        with self._opening:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(self.folder / file, os.O_RDWR)
                self._unwritten[file] = 0
            return self._descriptors[file]


class SafetensorsWriter(TensorWriter):
    """Writes slices into the files that ``plan.create(folder)`` made."""

    def __init__(self, plan: SafetensorsPlan, folder: Path) -> None:
        """Open nothing yet."""
        super().__init__(folder)
        self.plan = plan

    def write(self, name: str, index: tuple[slice, ...] | None, tensor: Tensor) -> int:
        """Write a slice of the tensor ``name``, see :meth:`TensorWriter.write_at`."""
        return self.write_at(self.plan.tensors[name], index, tensor)


def reserve(descriptor: int, size: int) -> None:
    """Make an open file as long as this, with room for it on the disk where the file system can promise that."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except (AttributeError, OSError) as error:
        # Not on macOS, nor on every file system; there a full disk shows itself only while writing.
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, size)


def begin_writing(descriptor: int) -> None:
    """Let the disk begin with what an open file has in memory, without waiting; only Linux has a call for that."""
    with contextlib.suppress(AttributeError):
        _LIBC.sync_file_range(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


_LIBC = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done
