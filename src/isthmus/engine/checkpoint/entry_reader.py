"""Reads the parts of a checkpoint that a rank needs, without a plan of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch import Tensor

from isthmus.engine.checkpoint.checkpoint_index import CheckpointIndex, Place
from isthmus.engine.checkpoint.opened_checkpoint import OpenedCheckpoint

_Target = Callable[[Any], None]


@dataclass(slots=True)
class EntryReader:
    """The reads of a rank: in the order of files and offsets, each part once."""

    checkpoint: OpenedCheckpoint
    entries: dict[str, Any]
    """Nested; values are ShardedTensor, whose data is set in place, or ShardedObject."""
    _reads: dict[Place, list[tuple[str, _Target]]] = field(default_factory=dict)
    _objects: dict[str, Any] = field(default_factory=dict)

    def find(self) -> None:
        """Find the parts of all entries.

        Raises:
            ValueError: the checkpoint does not have an entry, or with another shape.
        """
        index = self.checkpoint.index
        for entry in nested_values(self.entries):
            for place, target in _reads_of(entry, index, self._objects):
                self._reads.setdefault(place, []).append((entry.key, target))

    def files(self) -> set[str]:
        """Names of the files that have them."""
        return {self.checkpoint.index.files[number] for number, _, _ in self._reads}

    def check(self) -> None:
        """Check their files and blocks.

        Raises:
            DataError: a file is missing, truncated or damaged.
        """
        self.checkpoint.check((place, targets[0][0]) for place, targets in self._reads.items())

    def read(self) -> dict[str, Any]:
        """Set the tensors; returns the entries with tensors and objects in their place."""
        for place, targets in sorted(self._reads.items(), key=lambda read: read[0]):
            with self.checkpoint.open(place) as part:
                content = torch.load(part, map_location="cpu", weights_only=True)
            for _, target in targets:
                target(content)

        def value(entry: Any) -> Any:
            return self._objects[entry.unique_key] if isinstance(entry, ShardedObject) else entry.data

        result: dict[str, Any] = dict_list_map_outplace(value, self.entries)
        return result


def _reads_of(entry: Any, index: CheckpointIndex, objects: dict[str, Any]) -> Iterator[tuple[Place, _Target]]:
    if isinstance(entry, ShardedObject):
        key = entry.unique_key
        if key not in index.objects:
            raise ValueError(f"it has no {key}")

        def keep(content: Any) -> None:
            (objects[key],) = content  # of the objects that a rank has with this key

        yield index.objects[key], keep
        return
    assert isinstance(entry, ShardedTensor) and entry.data is not None
    parts = index.tensors.get(entry.key)
    if parts is None:
        raise ValueError(f"it has no {entry.key}")
    if parts.shape != tuple(entry.global_shape) and not entry.allow_shape_mismatch:
        raise ValueError(f"{entry.key} has shape {list(parts.shape)}, the run has {list(entry.global_shape)}")
    target = entry.data.detach()[(None,) * entry.prepend_axis_num]
    if entry.allow_shape_mismatch:  # the vocabulary is padded to a multiple of the ranks
        target.zero_()
    offset, missing = entry.global_offset, target.numel()
    for number in parts.within(offset, target.shape).tolist():
        start, size = parts.offsets[number].tolist(), parts.sizes[number].tolist()
        low = list(map(max, start, offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(start, size, offset, target.shape, strict=True))
        lengths = [end - begin for end, begin in zip(ends, low, strict=True)]
        block = _narrowed(target, low, offset, lengths)
        missing -= block.numel()
        yield _place(parts.places[number].tolist()), _copier(block, low, start, lengths)
    if missing and not entry.allow_shape_mismatch:
        raise ValueError(f"{missing:,} elements of {entry.key} are missing")


def _place(numbers: list[int]) -> Place:
    file, offset, length = numbers
    return file, offset, length


def _copier(block: Tensor, low: list[int], start: list[int], lengths: list[int]) -> _Target:
    def copy(content: Tensor) -> None:
        block.copy_(_narrowed(content, low, start, lengths))

    return copy


def _narrowed(tensor: Tensor, low: Any, origin: Any, lengths: Any) -> Tensor:
    return tensor[tuple(slice(a - o, a - o + n) for a, o, n in zip(low, origin, lengths, strict=True))]
