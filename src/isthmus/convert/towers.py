"""Tensors that are not computed: they are copied bit for bit, a few rows at a time.

They are those of a multimodal model beside its language model, and of MTP layers that are not built.

A Megatron checkpoint has them as safetensors files in ``hf/towers``, so that it converts without the model folder.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
from torch import Tensor

from isthmus.convert.canonical import Progress, row_slices
from isthmus.convert.hf.hf_weights import open_weights
from isthmus.convert.weight_source import TensorSpec, WeightSource
from isthmus.errors import disk_errors
from isthmus.families.family import Family
from isthmus.files.file_checksums import WrittenBlocks
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.tensors.parallel_writer import SafetensorsPlan, SafetensorsWriter
from isthmus.hf.tensors.safetensors_format import TensorInfo, byte_view

FOLDER = "towers"
"""Subfolder of a checkpoint's model folder."""


class Towers:
    """The tensors of ``source`` that the family passes through; a weight source."""

    def __init__(self, source: WeightSource, family: Family) -> None:
        self._source = source
        copied = family.copied_tensors(source.tensors)
        self.tensors: dict[str, TensorSpec | TensorInfo] = {
            name: meta for name, meta in source.tensors.items() if name in copied
        }

    def __str__(self) -> str:
        return str(self._source)

    @classmethod
    def from_source(cls, source: WeightSource, family: Family) -> Towers | None:
        """Towers of a model folder; None if it has none, and the family is not that of a multimodal model."""
        towers = cls(source, family)
        return towers if towers.tensors or family.nested is not None else None

    @classmethod
    def from_checkpoint(cls, folder: ModelFolder, family: Family) -> Towers | None:
        """Towers converted with a checkpoint, or those of the model folder that describes it; None without any."""
        if family.nested is None and not (family.passed_through or family.passed_layers):
            return None
        stored = folder.path / FOLDER
        if stored.is_dir():
            return cls(ModelFolder(stored, {}), family)
        if not folder.has_weights:
            return None
        towers = cls(open_weights(folder, family).source, family)
        return towers if towers.tensors else None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(_num_bytes(meta) for meta in self.tensors.values())

    def read(self, name: str, index: tuple[slice, ...] | None = None, *, into: Tensor | None = None) -> Tensor:
        return self._source.read(name, index, into=into)

    def copy(
        self,
        writer: SafetensorsWriter,
        names: Collection[str] | None = None,
        progress: Progress = lambda done, total: None,
    ) -> None:
        """Write all tensors, or those of ``names``, into files that were planned with them."""
        done = 0
        for name in self.tensors if names is None else names:
            for index in _chunks(self.tensors[name]):
                done += writer.write(name, index, self.read(name, index))
                progress(done, self.num_bytes)

    def store(self, folder: Path, progress: Progress = lambda done, total: None) -> WrittenBlocks:
        """Create the subfolder of a checkpoint's model folder; returns the checksums of what was written."""
        plan = SafetensorsPlan((name, meta.dtype, meta.shape) for name, meta in self.tensors.items())
        with disk_errors(folder):
            (folder / FOLDER).mkdir()
        plan.create(folder / FOLDER)
        with SafetensorsWriter(plan, folder / FOLDER) as writer:
            self.copy(writer, progress=progress)
        return writer.written

    def differences(self, other: Towers) -> list[str]:
        """The names of tensors that one of both does not have, or that differ in dtype, shape or bytes."""
        names = dict.fromkeys([*self.tensors, *other.tensors])
        return [name for name in names if not self._is_same(name, other)]

    def _is_same(self, name: str, other: Towers) -> bool:
        ours, theirs = self.tensors.get(name), other.tensors.get(name)
        if ours is None or theirs is None or (ours.dtype, tuple(ours.shape)) != (theirs.dtype, tuple(theirs.shape)):
            return False
        return all(
            np.array_equal(byte_view(self.read(name, index)), byte_view(other.read(name, index)))
            for index in _chunks(ours)
        )


def _chunks(meta: TensorSpec | TensorInfo) -> list[tuple[slice, ...] | None]:
    if not meta.shape:
        return [None]
    return [(rows,) for rows in row_slices(tuple(meta.shape), meta.dtype.itemsize)]


def _num_bytes(meta: TensorSpec | TensorInfo) -> int:
    return int(np.prod(meta.shape, dtype=np.int64)) * meta.dtype.itemsize
