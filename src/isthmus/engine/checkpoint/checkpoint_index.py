"""The index of a ``torch_dist`` checkpoint as arrays: which file has which part of each tensor.

torch's ``Metadata`` has five Python objects for each part, about 1 KB. A checkpoint of 16,384 ranks has 300,000 parts
and more, so ranks exchange and share these arrays (docs/decisions/0093).
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from isthmus.errors import IsthmusError

Numbers = NDArray[np.int64]
Place = tuple[int, int, int]
"""Number of a file, offset in it and length."""


@dataclass(frozen=True, slots=True)
class TensorParts:
    """The parts of a tensor of D dimensions."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: Numbers
    """[n, D]"""
    sizes: Numbers
    """[n, D]"""
    places: Numbers
    """[n, 3], each a Place."""

    def within(self, offset: Sequence[int], shape: Sequence[int]) -> Numbers:
        """Numbers of the parts that have elements of a block."""
        start, size = np.array(offset, np.int64), np.array(shape, np.int64)
        overlaps = (self.offsets < start + size) & (start < self.offsets + self.sizes)
        return np.flatnonzero(overlaps.all(axis=1) & self.sizes.all(axis=1))


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    files: list[str] = field(default_factory=list)
    """Names of files, in the folder of the checkpoint."""
    tensors: dict[str, TensorParts] = field(default_factory=dict)
    objects: dict[str, Place] = field(default_factory=dict)

    @property
    def num_parts(self) -> int:
        return len(self.objects) + sum(len(parts.places) for parts in self.tensors.values())

    def ends(self) -> dict[str, int]:
        """The bytes that each file has at least."""
        ends = np.zeros(len(self.files), np.int64)
        objects = np.array([*self.objects.values()], np.int64).reshape(-1, 3)
        for places in (objects, *(parts.places for parts in self.tensors.values())):
            np.maximum.at(ends, places[:, 0], places[:, 1] + places[:, 2])
        return dict(zip(self.files, ends.tolist(), strict=True))

    def to_bytes(self) -> bytes:
        """A JSON header, and the arrays of all tensors in their order."""
        tensors = [
            [name, str(parts.dtype).removeprefix("torch."), parts.shape, len(parts.places)]
            for name, parts in self.tensors.items()
        ]
        header = json.dumps({"files": self.files, "tensors": tensors, "objects": self.objects}).encode()
        header += b" " * (-len(header) % 8)
        arrays = (array for parts in self.tensors.values() for array in (parts.offsets, parts.sizes, parts.places))
        return b"".join([len(header).to_bytes(8, "little"), header, *(array.tobytes() for array in arrays)])

    @classmethod
    def from_bytes(cls, content: bytes | memoryview) -> CheckpointIndex:
        """The reverse of :meth:`to_bytes`; the arrays are views of ``content``."""
        view = memoryview(content)
        length = int.from_bytes(view[:8], "little")
        header, numbers, at = json.loads(bytes(view[8 : 8 + length])), np.frombuffer(view[8 + length :], np.int64), 0

        def array(count: int, width: int) -> Numbers:
            nonlocal at
            at += count * width
            return numbers[at - count * width : at].reshape(count, width)

        tensors = {
            name: TensorParts(
                getattr(torch, dtype), tuple(shape), array(n, len(shape)), array(n, len(shape)), array(n, 3)
            )
            for name, dtype, shape, n in header["tensors"]
        }
        return cls(header["files"], tensors, {name: tuple(place) for name, place in header["objects"].items()})


def written_index(items: Iterable[WriteItem], written: Mapping[MetadataIndex, _StorageInfo]) -> CheckpointIndex:
    """The index of what one rank has written; ``items`` is its plan and ``written`` has their places."""
    files: dict[str, int] = {}
    objects: dict[str, Place] = {}
    rows: dict[str, tuple[Any, list[Sequence[int]], list[Sequence[int]], list[Place]]] = {}
    for item in items:
        info = written[item.index]
        place = files.setdefault(info.relative_path, len(files)), info.offset, info.length
        if item.type == WriteItemType.BYTE_IO:
            objects[item.index.fqn] = place
            continue
        assert item.tensor_data is not None
        data, chunk = item.tensor_data, item.tensor_data.chunk
        _, offsets, sizes, places = rows.setdefault(item.index.fqn, (data, [], [], []))
        offsets.append(chunk.offsets)
        sizes.append(chunk.sizes)
        places.append(place)
    tensors = {
        name: TensorParts(
            data.properties.dtype,
            tuple(data.size),
            _array(offsets, len(data.size)),
            _array(sizes, len(data.size)),
            _array(places, 3),
        )
        for name, (data, offsets, sizes, places) in rows.items()
    }
    return CheckpointIndex([*files], tensors, objects)


def merged_index(compressed: Iterable[bytes]) -> CheckpointIndex:
    """The index of all ranks, from :func:`compressed_index` of each, in their order.

    Raises:
        IsthmusError: the parts of a tensor overlap or have gaps, or two ranks have written the same object.
    """
    files: list[str] = []
    objects: dict[str, Place] = {}
    pieces: dict[str, list[TensorParts]] = {}
    for content in compressed:
        index = CheckpointIndex.from_bytes(zlib.decompress(content))
        shift = len(files)
        files += index.files
        for name, parts in index.tensors.items():
            pieces.setdefault(name, []).append(replace_files(parts, shift))
        for name, (file, offset, length) in index.objects.items():
            if name in objects:
                raise IsthmusError(f"two ranks have written {name} of the checkpoint; nothing is published.")
            objects[name] = file + shift, offset, length
    tensors: dict[str, TensorParts] = {}
    while pieces:  # frees what is joined
        name, several = pieces.popitem()
        tensors[name] = _joined(name, several)
    return CheckpointIndex(files, dict(reversed(tensors.items())), objects)


def compressed_index(index: CheckpointIndex) -> bytes:
    return zlib.compress(index.to_bytes(), level=1)


def replace_files(parts: TensorParts, shift: int) -> TensorParts:
    places = parts.places + np.array([shift, 0, 0], np.int64)
    return TensorParts(parts.dtype, parts.shape, parts.offsets, parts.sizes, places)


def _joined(name: str, several: Sequence[TensorParts]) -> TensorParts:
    first = several[0]
    if any((parts.dtype, parts.shape) != (first.dtype, first.shape) for parts in several):
        raise IsthmusError(f"ranks have written {name} of the checkpoint with several shapes or dtypes.")
    joined = TensorParts(
        first.dtype,
        first.shape,
        np.concatenate([parts.offsets for parts in several]),
        np.concatenate([parts.sizes for parts in several]),
        np.concatenate([parts.places for parts in several]),
    )
    if not covers_once(joined):
        elements = int(np.prod(joined.sizes, axis=1).sum())
        raise IsthmusError(
            f"the ranks have written {elements:,} elements of {name} of the checkpoint, which has "
            f"{math.prod(first.shape):,}, with gaps or twice; nothing is published."
        )
    return joined


def covers_once(parts: TensorParts) -> bool:
    """Whether the parts have each element of the tensor once.

    Each coordinate gets a random number of 64 bits, and an interval the difference of those of its ends. The product
    over the dimensions is a measure of blocks: those of the parts have the sum of the tensor's for any numbers only if
    they cover it once. Parts that do not are accepted with a probability of about 2^-60.
    """
    if (parts.offsets < 0).any() or (parts.offsets + parts.sizes > np.array(parts.shape, np.int64)).any():
        return False
    measure, full = np.ones(len(parts.places), np.uint64), np.ones(1, np.uint64)
    for dimension, size in enumerate(parts.shape):
        start = parts.offsets[:, dimension]
        measure *= _random(start + parts.sizes[:, dimension], dimension) - _random(start, dimension)
        full *= _random(np.array([size]), dimension) - _random(np.array([0]), dimension)
    return bool(measure.sum(dtype=np.uint64) == full[0])


def _random(coordinates: Numbers, dimension: int) -> NDArray[np.uint64]:
    """SplitMix64 of coordinates and dimension."""
    x = coordinates.astype(np.uint64) * np.uint64(8) + np.uint64(dimension + 1)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _array(rows: Sequence[Sequence[int]], width: int) -> Numbers:
    return np.array(rows, np.int64).reshape(len(rows), width)
