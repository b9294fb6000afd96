"""What ``torch.save`` wrote before 1.6: pickles one after the other, and behind them the bytes of the tensors."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from isthmus.convert.legacy.torch_pickle import Places, reading
from isthmus.errors import DataError

_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001


def read_old_archive(path: Path) -> Any:
    """The object that was saved, with places for tensors: as ``read_archive`` gives it, strided ones included.

    Raises:
        UnsafeInput: it names anything but tensors, plain values and what is known to lie in checkpoints.
        DataError: it is cut short or no such archive.
    """
    with reading(path), path.open("rb") as file:
        magic, version, system = (Places(path, file).load() for _ in range(3))
        if (magic, version) != (_MAGIC, _VERSION):
            raise DataError("it is nothing that torch.save wrote")
        if not system["little_endian"]:
            raise DataError("its numbers are big-endian, little-endian ones are read")
        # Where the tensors lie is said behind the pickle that names them, so that one is read twice.
        begin = file.tell()
        named = _Stream(path, file, None)
        named.load()
        offsets = _offsets(file, Places(path, file).load(), named.storages)
        file.seek(begin)
        return _Stream(path, file, offsets).load()


def _offsets(file: BinaryIO, keys: list[str], storages: Mapping[str, tuple[torch.dtype, int]]) -> dict[str, int]:
    """Where each storage begins: they follow each other, each behind its number of elements in 8 bytes."""
    at, size = file.tell(), file.seek(0, io.SEEK_END)
    found: dict[str, int] = {}
    for key in keys:
        dtype, numel = storages[key]
        file.seek(at)
        if (said := int.from_bytes(file.read(8), "little")) != numel and at + 8 <= size:
            raise DataError(f"tensor {key} has {said} elements, {numel} are needed")
        found[key] = at + 8
        at += 8 + numel * dtype.itemsize
    if at > size:
        raise DataError(f"it is cut short: {at} bytes are needed, it has {size}")
    return found


class _Stream(Places):
    """The pickle that names the tensors; without offsets it only finds out which storages there are."""

    def __init__(self, path: Path, pickled: BinaryIO, offsets: Mapping[str, int] | None) -> None:
        super().__init__(path, pickled, strided=True)
        self._offsets = offsets
        self.storages: dict[str, tuple[torch.dtype, int]] = {}

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, str, int]:
        dtype, key, numel = super().persistent_load(pid)
        self.storages[key] = dtype, numel
        return dtype, key, numel

    def storage_offset(self, key: str, num_bytes: int) -> int:
        return 0 if self._offsets is None else self._offsets[key]
