"""Reads slices of tensors from open files, without memory-mapping them."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from isthmus.errors import DataError, IOFailure
from isthmus.hf.tensors.safetensors_format import (
    Bounds,
    CastBuffer,
    TensorInfo,
    bounds_of,
    byte_runs,
    byte_view,
    row_chunks,
    steps_of,
)


class TensorReader:
    """Opens files on first use; thread-safe."""

    def __init__(self) -> None:
        self._files: dict[Path, BinaryIO] = {}
        self._opening = threading.Lock()
        self._cast_buffer = CastBuffer()

    def read(self, info: TensorInfo, index: tuple[slice, ...] | None = None, *, into: Tensor | None = None) -> Tensor:
        """Read a slice of one tensor; only its bytes are read (with a step, also those between).

        With ``into`` (any dtype, device and strides; the shape of the slice) it is filled and returned, without an
        intermediate copy if it is a contiguous CPU tensor of the file's dtype.
        """
        bounds = bounds_of(info.shape, index)
        shape = tuple(stop - start for start, stop in bounds)
        if (steps := steps_of(index)) is not None:
            around = torch.empty(shape, dtype=info.dtype)
            self._fill(info, bounds, around)
            return around[steps] if into is None else into.detach().copy_(around[steps])
        target = torch.empty(shape, dtype=info.dtype) if into is None else into.detach()
        if tuple(target.shape) != shape:
            raise ValueError(f"{info.file}: a slice of shape {shape} does not fit into {tuple(target.shape)}")
        if target.dtype == info.dtype and target.device.type == "cpu" and target.is_contiguous():
            self._fill(info, bounds, target)
            return target
        buffer = self._cast_buffer
        for part, rows in row_chunks(bounds, info.dtype.itemsize, buffer.limit_bytes):
            chunk = buffer.take([stop - start for start, stop in part], info.dtype)
            self._fill(info, part, chunk)
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

    def _fill(self, info: TensorInfo, bounds: Bounds, target: Tensor) -> None:
        if not target.numel():
            return
        try:
            read_runs(self._descriptor(info.file), info, bounds, target)
        except OSError as error:
            raise IOFailure(f"{info.file} cannot be read: {error.strerror}.") from error


def read_runs(descriptor: int, info: TensorInfo, bounds: Bounds, target: Tensor) -> None:
    """Read a slice into a contiguous CPU tensor; one call of the system reads less than 2 GiB."""
    view, done = byte_view(target), 0
    for offset, length in byte_runs(info.shape, bounds, info.dtype.itemsize):
        end = done + length
        while done < end:
            got = os.preadv(descriptor, [view[done:end]], info.offset + offset + length - (end - done))
            if not got:
                raise DataError(f"{info.file} was truncated while it was read. Download or write it again.")
            done += got
