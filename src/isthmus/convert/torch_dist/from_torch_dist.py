"""Reads ``torch_dist`` checkpoints a few rows at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.convert.canonical import CanonicalWeights, unique_placements
from isthmus.convert.coverage import reject_mismatch
from isthmus.convert.torch_dist import dcp_metadata as dcp
from isthmus.convert.torch_pickle import args_in, read_torch_pickle
from isthmus.engine.tensor_names import COMMON_FILE, COMMON_OBJECT, CheckpointSlot, Spelling, is_model_key, spelling_of
from isthmus.errors import DataError, MissingInput, UnsafeInput
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.files.checked_files import ChecksumVerifier
from isthmus.files.folder_links import check_links
from isthmus.hf.tensors.safetensors_format import TensorInfo, TensorReader

_MAX_CELLS = 1024
"""Most cells between the edges of the chunks of a tensor, for each chunk: a grid has one."""


class TorchDistFolder:
    """The tensors of a checkpoint by key, assembled from chunks."""

    def __init__(self, path: Path) -> None:
        """Check the size of each file, and that chunks cover each tensor exactly once."""
        self.path = path
        if not (path / dcp.METADATA_FILE).is_file():
            raise MissingInput(f"{path} has no .metadata, so it is not a torch_dist checkpoint. Give one that is.")
        check_links(path)
        self._verifier = ChecksumVerifier()
        self._verifier.check(path / dcp.METADATA_FILE)
        metadata = dcp.load_metadata(path / dcp.METADATA_FILE)
        try:
            self.tensors: dict[str, dcp.TensorStorageMetadata] = {
                key: entry
                for key, entry in metadata.state_dict_metadata.items()
                if isinstance(entry, dcp.TensorStorageMetadata)
            }
            self._storage: Mapping[dcp.MetadataIndex, dcp.StorageInfo] = metadata.storage_data
            self._check_files()
            for key, meta in self.tensors.items():
                if is_model_key(key):
                    self._check_chunks(key, meta)
        except (AttributeError, TypeError, IndexError, ValueError) as error:
            raise DataError(
                f"{path / dcp.METADATA_FILE} is not checkpoint metadata ({error}). Fetch it again."
            ) from None
        self._chunks: dict[tuple[str, int], dict[tuple[int, ...], list[dcp.ChunkStorageMetadata]]] = {}
        self._infos: dict[dcp.MetadataIndex, TensorInfo] = {}
        self._reader = TensorReader(self._verifier)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def args(self) -> dict[str, Any] | None:
        """Megatron-LM's arguments in the common state; None if it has none."""
        path = self.path / COMMON_FILE
        if path.is_file():
            return args_in(read_torch_pickle(path, verifier=self._verifier))
        if (place := self._storage.get(dcp.MetadataIndex(COMMON_OBJECT))) is None:
            return None
        file = self.path / place.relative_path
        values = read_torch_pickle(file, place.offset, place.length, verifier=self._verifier, tensor=COMMON_OBJECT)
        return args_in(values[0]) if isinstance(values, list) and values else None

    def read(self, place: CheckpointSlot, rows: slice) -> Tensor:
        meta, depth = self.tensors[place.key], len(place.index)
        tail = tuple(meta.size)[depth + 1 :]
        tensor = torch.empty((rows.stop - rows.start, *tail), dtype=meta.properties.dtype)
        for chunk in self._chunks_at(place):
            starts, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            low, high = max(rows.start, starts[depth]), min(rows.stop, starts[depth] + sizes[depth])
            if low >= high:
                continue
            inner = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))[depth + 1 :]
            slices = (slice(low - rows.start, high - rows.start), *inner)
            target = tensor[slices]
            before = [at - start for at, start in zip(place.index, starts, strict=False)]
            index = (*(slice(at, at + 1) for at in before), slice(low - starts[depth], high - starts[depth]))
            self._reader.read(self._info(place.key, chunk), index, into=target[(None,) * depth], name=place.key)
        return tensor

    def _chunks_at(self, place: CheckpointSlot) -> list[dcp.ChunkStorageMetadata]:
        """The chunks that overlap the index (layer, expert) of the slot."""
        which = place.key, len(place.index)
        if which not in self._chunks:
            chunks: dict[tuple[int, ...], list[dcp.ChunkStorageMetadata]] = {}
            for chunk in self.tensors[place.key].chunks:
                axes = list(zip(chunk.offsets, chunk.sizes, strict=True))[: len(place.index)]
                for index in itertools.product(*(range(start, start + size) for start, size in axes)):
                    chunks.setdefault(index, []).append(chunk)
            self._chunks[which] = chunks
        return self._chunks[which][place.index]

    def _info(self, key: str, chunk: dcp.ChunkStorageMetadata) -> TensorInfo:
        index = dcp.MetadataIndex(key, chunk.offsets)
        if index not in self._infos:
            if index not in self._storage:
                raise DataError(f"{self}: a chunk of {key} is in none of its files. Fetch it again.")
            entry = self._storage[index]
            if getattr(entry, "transform_descriptors", None):
                raise DataError(f"{self}: {key} is compressed, which is not supported. Save it uncompressed.")
            file = self.path / entry.relative_path
            info = read_torch_pickle(file, entry.offset, entry.length, verifier=self._verifier, tensor=key)
            expected = (self.tensors[key].properties.dtype, tuple(chunk.sizes))
            if not isinstance(info, TensorInfo) or (info.dtype, info.shape) != expected:
                raise DataError(f"{self}: a chunk of {key} is {info}, but .metadata has {expected}. Fetch it again.")
            self._infos[index] = info
        return self._infos[index]

    def _check_files(self) -> None:
        spans_of: dict[str, list[tuple[int, int]]] = {}
        for entry in self._storage.values():
            spans_of.setdefault(entry.relative_path, []).append((entry.offset, entry.offset + entry.length))
        for name, spans in spans_of.items():
            if not (self.path / name).resolve().is_relative_to(self.path.resolve()):
                raise UnsafeInput(
                    f"{self.path / dcp.METADATA_FILE} names {name!r}, outside of the folder. Do not use it."
                )
            size = (self.path / name).stat().st_size if (self.path / name).is_file() else -1
            if size < (end := max(stop for _, stop in spans)):
                problem = "is missing" if size < 0 else f"has {size} bytes"
                raise DataError(f"{self.path / name} {problem}, {end} are needed. Fetch it again.")
            for (_, stop), (start, _) in itertools.pairwise(sorted(spans)):
                if start < stop:
                    raise DataError(
                        f"{self.path / name}: two tensors overlap, one ends at {stop}, one starts at {start}."
                    )

    def _check_chunks(self, key: str, meta: dcp.TensorStorageMetadata) -> None:
        """Check that each element is in exactly one chunk: count chunks per cell between all chunk edges."""
        if not isinstance(meta.properties.dtype, torch.dtype):
            raise TypeError(f"{key} is of type {meta.properties.dtype!r}")
        edges = [
            sorted(
                {0, size, *(edge for c in meta.chunks for edge in (c.offsets[axis], c.offsets[axis] + c.sizes[axis]))}
            )
            for axis, size in enumerate(meta.size)
        ]
        if math.prod(len(cuts) for cuts in edges) > _MAX_CELLS * (1 + len(meta.chunks)):
            raise DataError(f"{self}: the chunks of {key} are no grid. Save the checkpoint again.")
        positions = [{edge: position for position, edge in enumerate(cuts)} for cuts in edges]
        cells = np.zeros([len(cuts) - 1 for cuts in edges], dtype=np.int32)
        for chunk in meta.chunks:
            spans = zip(positions, chunk.offsets, chunk.sizes, strict=True)
            cells[tuple(slice(at[start], at[start + size]) for at, start, size in spans)] += 1
        if (cells != 1).any():
            elements = sum(math.prod(chunk.sizes) for chunk in meta.chunks)
            raise DataError(
                f"{self.path / dcp.METADATA_FILE}: the chunks of {key} have {elements} elements of "
                f"{math.prod(meta.size)}, with gaps or overlaps. Fetch it again."
            )
        for chunk in meta.chunks:
            entry = self._storage.get(dcp.MetadataIndex(key, chunk.offsets))
            size = math.prod(chunk.sizes) * meta.properties.dtype.itemsize
            if entry is None or (size > entry.length and not getattr(entry, "transform_descriptors", None)):
                raise DataError(f"{self}: a chunk of {key} is in none of its files. Fetch it again.")


class TorchDistWeights(CanonicalWeights):
    def __init__(self, folder: TorchDistFolder, family: Family, arch: Architecture) -> None:
        self.source: TorchDistFolder = folder
        self._places: dict[str, list[CheckpointSlot]] = {}
        spelling = spelling_of(arch)
        missing: list[str] = []
        misshapen: list[str] = []
        used: set[str] = set()
        for name, placed in unique_placements(family, arch).items():
            possible = spelling.alternatives(name, [rows for rows, *_ in placed.rule.part_shapes(arch)])
            present = [slots for slots in possible if all(slot.key in folder.tensors for slot in slots)]
            if not present:
                missing.append(possible[0][0].key)
                continue
            self._places[name] = present[0]
            used |= {slot.key for slots in present for slot in slots}
            expected = placed.rule.canonical_shape(arch)
            for slot in present[0]:
                misshapen += self._differences(slot, expected, spelling, padded=placed.rule.shard == "vocab")
        unexpected = [key for key in folder.tensors if is_model_key(key) and key not in used]
        reject_mismatch(folder, family, missing=sorted(set(missing)), unexpected=unexpected, misshapen=misshapen)

    def dtype(self, canonical: str) -> torch.dtype:
        dtype: torch.dtype = self.source.tensors[self._places[canonical][0].key].properties.dtype
        return dtype

    def read(self, canonical: str, rows: slice) -> Tensor:
        slots = self._places[canonical]
        if slots[0].rows is None:
            return self.source.read(slots[0], rows)
        pieces = []
        for slot in slots:
            first, end = slot.rows or (0, 0)
            if (low := max(rows.start, first)) < (high := min(rows.stop, end)):
                pieces.append(self.source.read(slot, slice(low - first, high - first)))
        return torch.cat(pieces)

    def _differences(
        self, slot: CheckpointSlot, expected: tuple[int, ...], spelling: Spelling, *, padded: bool
    ) -> Iterator[str]:
        """What is wrong with the shape of a tensor; ``padded`` ones may have more rows."""
        size = tuple(self.source.tensors[slot.key].size)
        outer, shape = size[: len(slot.index)], size[len(slot.index) :]
        if slot.rows is not None:
            expected = (slot.rows[1] - slot.rows[0], *expected[1:])
        if outer != slot.sizes:
            counted = " and ".join(["layers", "experts"][: len(outer)] if spelling.homogeneous else ["experts"])
            yield f"{slot.key} has {'x'.join(map(str, outer))} {counted}, not {'x'.join(map(str, slot.sizes))}"
        if shape != expected and not (padded and shape > expected and shape[1:] == expected[1:]):
            yield f"{slot.key} is {list(shape)}, not {list(expected)}"
