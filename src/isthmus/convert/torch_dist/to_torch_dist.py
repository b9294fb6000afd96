"""Writes a ``torch_dist`` checkpoint tensor by tensor; any parallel layout can load it.

torch's writer would keep each tensor in memory twice and compute an unused checksum. The bytes that ``torch.save``
adds around a tensor depend only on its dtype and shape, so they are computed once per dtype and shape.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.convert.canonical import Destination, unique_placements
from isthmus.convert.torch_dist import dcp_metadata as dcp
from isthmus.convert.torch_pickle import read_torch_pickle, save_without_data
from isthmus.engine.tensor_names import COMMON_FILE, COMMON_OBJECT, CheckpointSlot, spelling_of
from isthmus.engine.upstream.megatron_features import saves_common_state_object
from isthmus.errors import disk_errors
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.hf.tensors.parallel_writer import TensorWriter, reserve
from isthmus.hf.tensors.safetensors_format import TensorInfo

FORMAT: dict[str, str | int] = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
NUM_FILES = 2
"""More than one, because the kernel lets one thread at a time write into a file."""


class TorchDistWriter(Destination):
    """Tensor files, ``.metadata``, ``metadata.json`` and ``common.pt``."""

    def __init__(
        self,
        folder: Path,
        family: Family,
        arch: Architecture,
        dtypes: Mapping[str, torch.dtype],
        common: Mapping[str, Any],
    ) -> None:
        """``common`` is the content that is not a tensor: ``args``, ``iteration`` etc."""
        self._frames: dict[tuple[torch.dtype, tuple[int, ...]], tuple[bytes, bytes]] = {}
        self._folder = folder
        self._metadata = dcp.Metadata({}, {})
        self._infos: dict[str, list[tuple[TensorInfo, int]]] = {}
        """The files' parts of each canonical tensor, with the first row of each."""
        self._sizes = [0] * NUM_FILES
        self._around: list[list[tuple[int, bytes]]] = [[] for _ in range(NUM_FILES)]
        placements, spelling = unique_placements(family, arch), spelling_of(arch)
        with disk_errors(folder):
            for name, placed in placements.items():
                shape = placed.rule.canonical_shape(arch)
                slots = spelling.slots(name, [rows for rows, *_ in placed.rule.part_shapes(arch)])
                self._infos[name] = [self._add_slot(slot, shape, dtypes[name]) for slot in slots]
            empty = _object(None)
            for key in spelling.extra_states(placements):
                self._add_object(key, empty)
            if saves_common_state_object():
                self._add_object(COMMON_OBJECT, _object(dict(common)))
        self.total_bytes: int = sum(info.nbytes for infos in self._infos.values() for info, _ in infos)
        with disk_errors(folder, self.total_bytes):
            for number, size in enumerate(self._sizes):
                with (folder / _file_name(number)).open("xb") as opened:
                    reserve(opened.fileno(), size)
                    for offset, content in self._around[number]:
                        opened.seek(offset)
                        opened.write(content)
            dcp.save_metadata(self._metadata, folder / dcp.METADATA_FILE)
            (folder / "metadata.json").write_text(json.dumps(FORMAT), encoding="utf-8")
            torch.save(dict(common), folder / COMMON_FILE)
        self.writer: TensorWriter = TensorWriter(folder)

    def put(self, canonical: str, rows: slice, chunk: Tensor) -> int:
        done = 0
        for info, first in self._infos[canonical]:
            depth = len(info.shape) - chunk.ndim
            low, high = max(rows.start, first), min(rows.stop, first + info.shape[depth])
            if low < high:
                index = (*(slice(0, 1) for _ in range(depth)), slice(low - first, high - first))
                values = chunk[low - rows.start : high - rows.start]
                done += self.writer.write_at(info, index, values[(None,) * depth])
        return done

    def _add_slot(self, slot: CheckpointSlot, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[TensorInfo, int]:
        first, end = slot.rows or (0, shape[0])
        return self._add_tensor(slot, (end - first, *shape[1:]), dtype), first

    def _add_tensor(self, place: CheckpointSlot, shape: tuple[int, ...], dtype: torch.dtype) -> TensorInfo:
        """Reserve space in the smallest file, and add the tensor to the metadata."""
        chunk_shape = (*(1 for _ in place.index), *shape)
        before, after = self._frame(dtype, chunk_shape)
        file = min(range(NUM_FILES), key=self._sizes.__getitem__)
        start = self._sizes[file]
        data = start + len(before)
        info = TensorInfo(dtype, chunk_shape, Path(_file_name(file)), data)
        self._around[file] += [(start, before), (data + info.nbytes, after)]
        self._sizes[file] = data + info.nbytes + len(after)
        chunk = dcp.ChunkStorageMetadata(torch.Size((*place.index, *(0 for _ in shape))), torch.Size(chunk_shape))
        metadata = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype), torch.Size((*place.sizes, *shape)), [])
        entry = self._metadata.state_dict_metadata.setdefault(place.key, metadata)
        assert isinstance(entry, dcp.TensorStorageMetadata)
        entry.chunks.append(chunk)
        self._add_storage(dcp.MetadataIndex(place.key, chunk.offsets), file, start)
        return info

    def _add_object(self, key: str, content: bytes) -> None:
        start = self._sizes[0]
        self._around[0].append((start, content))
        self._sizes[0] += len(content)
        self._metadata.state_dict_metadata[key] = dcp.BytesStorageMetadata()
        self._add_storage(dcp.MetadataIndex(key), 0, start)

    def _add_storage(self, index: dcp.MetadataIndex, file: int, start: int) -> None:
        self._metadata.storage_data[index] = dcp.StorageInfo(_file_name(file), start, self._sizes[file] - start)

    def _frame(self, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
        """The bytes of ``torch.save`` before and after those of a tensor."""
        if (dtype, shape) not in self._frames:
            path = self._folder / "frame.pt"
            save_without_data(torch.empty(shape, dtype=dtype), path)
            info = read_torch_pickle(path)
            with path.open("rb") as file:
                before = file.read(info.offset)
                file.seek(info.offset + math.prod(shape) * dtype.itemsize)
                self._frames[dtype, shape] = before, file.read()
            path.unlink()
        return self._frames[dtype, shape]


def _object(content: Any) -> bytes:
    """In a list, since Megatron-Core reads its first element."""
    torch.save([content], buffer := io.BytesIO())
    return buffer.getvalue()


def _file_name(number: int) -> str:
    return f"__0_{number}.distcp"
