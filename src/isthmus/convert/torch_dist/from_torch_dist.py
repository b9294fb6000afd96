"""Megatron's ``torch_dist`` checkpoints, read rows at a time without a model or a process group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.convert.canonical import own_placements, spelling_of
from isthmus.convert.coverage import told
from isthmus.convert.legacy.torch_pickle import read_archive
from isthmus.convert.torch_dist.dcp_metadata import NAME, Chunk, ChunkKey, FilePart, TensorEntry, load_index
from isthmus.engine.checkpoint.checkpoint_names import TRACKER, Place, is_model_key
from isthmus.errors import DataError, MissingInput, UnsafeInput
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.hf.tensors.safetensors_format import TensorInfo
from isthmus.hf.tensors.slice_reader import TensorReader


def checkpoint_folder(path: Path) -> Path | None:
    """The folder with the files: ``path`` itself, or the one that the tracker file in it names; None if neither is.

    Raises:
        DataError: the tracker file names a checkpoint that is not there.
    """
    if (path / NAME).is_file() or any(path.glob("mp_rank_*")):
        return path
    tracker = path / TRACKER
    if not tracker.is_file():
        return None
    word = tracker.read_text(encoding="utf-8", errors="replace").strip()
    folder = path / (f"iter_{int(word):07d}" if word.isascii() and word.isdigit() else "release")
    if (word != "release" and not word.isdigit()) or not folder.is_dir():
        raise DataError(f"{tracker} says {word!r}, which is not a checkpoint in {path}. Name the folder itself.")
    return folder


class TorchDistFolder:
    """The tensors of a checkpoint by their keys; whole in meaning, in chunks on the disk."""

    def __init__(self, path: Path) -> None:
        """Read the index and see that every file is there and long enough, and that the chunks make up the tensors.

        Raises:
            MissingInput: there is no index.
            UnsafeInput: the index runs code or names files elsewhere.
            DataError: the index cannot be read or contradicts itself, or a file is missing or cut short.
        """
        self.path = path
        if not (path / NAME).is_file():
            raise MissingInput(
                f"{path} holds no .metadata, so it is no torch_dist checkpoint. Choose a folder that is."
            )
        index = load_index(path / NAME)
        try:
            self.tensors: dict[str, TensorEntry] = {
                key: entry for key, entry in index.state_dict_metadata.items() if isinstance(entry, TensorEntry)
            }
            self._stored: Mapping[ChunkKey, FilePart] = index.storage_data
            self._check_files()
            for key, meta in self.tensors.items():
                if is_model_key(key):
                    self._check_chunks(key, meta)
        except (AttributeError, TypeError, IndexError, ValueError) as error:
            raise DataError(f"{path / NAME} is not the index of a checkpoint ({error}). Fetch it again.") from None
        self._chunks: dict[tuple[str, int], dict[tuple[int, ...], list[Chunk]]] = {}
        self._infos: dict[ChunkKey, TensorInfo] = {}
        self._reader = TensorReader()

    def __str__(self) -> str:
        """The path, for messages."""
        return str(self.path)

    @property
    def args(self) -> dict[str, Any] | None:
        """The arguments of the training that wrote it; None where it kept none.

        Raises:
            UnsafeInput, DataError: ``common.pt`` cannot be read.
        """
        path = self.path / "common.pt"
        common = read_archive(path) if path.is_file() else {}
        args = common.get("args") if isinstance(common, dict) else None
        return None if args is None else dict(vars(args))

    def read(self, place: Place, rows: slice) -> Tensor:
        """Rows of the tensor at ``place``, put together from its chunks.

        Raises:
            DataError: a chunk is missing or damaged.
        """
        meta, depth = self.tensors[place.key], len(place.index)
        tail = tuple(meta.size)[depth + 1 :]
        found = torch.empty((rows.stop - rows.start, *tail), dtype=meta.properties.dtype)
        for chunk in self._chunks_at(place):
            starts, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            low, high = max(rows.start, starts[depth]), min(rows.stop, starts[depth] + sizes[depth])
            if low >= high:
                continue
            inner = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))[depth + 1 :]
            target = found[(slice(low - rows.start, high - rows.start), *inner)]
            before = [at - start for at, start in zip(place.index, starts, strict=False)]
            index = (*(slice(at, at + 1) for at in before), slice(low - starts[depth], high - starts[depth]))
            self._reader.read(self._info(place.key, chunk), index, into=target[(None,) * depth])
        return found

    def _chunks_at(self, place: Place) -> list[Chunk]:
        """The chunks of a tensor that hold something of it at the index of the place."""
        which = place.key, len(place.index)
        if which not in self._chunks:
            found: dict[tuple[int, ...], list[Chunk]] = {}
            for chunk in self.tensors[place.key].chunks:
                axes = list(zip(chunk.offsets, chunk.sizes, strict=True))[: len(place.index)]
                for index in itertools.product(*(range(start, start + size) for start, size in axes)):
                    found.setdefault(index, []).append(chunk)
            self._chunks[which] = found
        return self._chunks[which][place.index]

    def _info(self, key: str, chunk: Chunk) -> TensorInfo:
        place = ChunkKey(key, chunk.offsets)
        if place not in self._infos:
            if place not in self._stored:
                raise DataError(f"{self}: a chunk of {key} is in none of its files. Fetch it again.")
            entry = self._stored[place]
            if getattr(entry, "transform_descriptors", None):
                raise DataError(f"{self}: {key} is compressed, which is not read. Save it uncompressed.")
            info = read_archive(self.path / entry.relative_path, entry.offset, entry.length)
            wanted = (self.tensors[key].properties.dtype, tuple(chunk.sizes))
            if not isinstance(info, TensorInfo) or (info.dtype, info.shape) != wanted:
                raise DataError(f"{self}: a chunk of {key} is {info}, not {wanted} as promised. Fetch it again.")
            self._infos[place] = info
        return self._infos[place]

    def _check_files(self) -> None:
        places: dict[str, list[tuple[int, int]]] = {}
        for entry in self._stored.values():
            places.setdefault(entry.relative_path, []).append((entry.offset, entry.offset + entry.length))
        for name, spans in places.items():
            if not (self.path / name).resolve().is_relative_to(self.path.resolve()):
                raise UnsafeInput(f"{self.path / NAME} names {name!r}, which lies outside. Do not use it.")
            size = (self.path / name).stat().st_size if (self.path / name).is_file() else -1
            if size < (end := max(stop for _, stop in spans)):
                found = "is missing" if size < 0 else f"has {size} bytes"
                raise DataError(f"{self.path / name} {found}, {end} are needed. Fetch it again.")
            for (_, stop), (start, _) in itertools.pairwise(sorted(spans)):
                if start < stop:
                    raise DataError(f"{self.path / name}: two tensors overlap, one ends at {stop}, one is at {start}.")

    def _check_chunks(self, key: str, meta: TensorEntry) -> None:
        """Every element lies in one chunk: counted on the grid that the edges of all chunks draw."""
        if not isinstance(meta.properties.dtype, torch.dtype):
            raise TypeError(f"{key} is of type {meta.properties.dtype!r}")
        edges = [
            sorted(
                {0, size, *(edge for c in meta.chunks for edge in (c.offsets[axis], c.offsets[axis] + c.sizes[axis]))}
            )
            for axis, size in enumerate(meta.size)
        ]
        places = [{edge: place for place, edge in enumerate(cuts)} for cuts in edges]
        cells = np.zeros([len(cuts) - 1 for cuts in edges], dtype=np.int32)
        for chunk in meta.chunks:
            spans = zip(places, chunk.offsets, chunk.sizes, strict=True)
            cells[tuple(slice(place[start], place[start + size]) for place, start, size in spans)] += 1
        if (cells != 1).any():
            held = sum(math.prod(chunk.sizes) for chunk in meta.chunks)
            raise DataError(
                f"{self.path / NAME}: the chunks of {key} hold {held} elements of {math.prod(meta.size)}, "
                "with gaps or twice. Fetch it again."
            )


class TorchDistWeights:
    """The tensors of a model in a ``torch_dist`` checkpoint under canonical names."""

    def __init__(self, folder: TorchDistFolder, family: Family, arch: Architecture) -> None:
        """Find every tensor of the model; those that are there and belong to no model of this architecture fail.

        Raises:
            DataError: tensors are missing, left over, or of another shape.
        """
        self._folder = folder
        self._places: dict[str, Place] = {}
        spelling = spelling_of(arch)
        missing, misshapen, used = [], [], set()
        for name, placed in own_placements(family, arch).items():
            possible = spelling.possible_places(name)
            present = [place for place in possible if place.key in folder.tensors]
            if not present:
                missing.append(possible[0].key)
                continue
            place = self._places[name] = present[0]
            used |= {place.key for place in present}
            size = tuple(folder.tensors[place.key].size)
            outer, found = size[: len(place.index)], size[len(place.index) :]
            wanted = placed.rule.canonical_shape(arch)
            if outer != place.sizes:
                counted = " and ".join(["layers", "experts"][: len(outer)] if spelling.alike else ["experts"])
                misshapen.append(
                    f"{place.key} has {'x'.join(map(str, outer))} {counted}, not {'x'.join(map(str, place.sizes))}"
                )
            # The vocabulary may be padded; everything else is as it is.
            padded = placed.rule.shard == "vocab" and found > wanted and found[1:] == wanted[1:]
            if found != wanted and not padded:
                misshapen.append(f"{place.key} is {list(found)}, not {list(wanted)}")
        left = [key for key in folder.tensors if is_model_key(key) and key not in used]
        misshapen = list(dict.fromkeys(misshapen))
        if faults := told(missing=sorted(set(missing)), unexpected=left, misshapen=misshapen):
            raise DataError(
                f"{folder} is not the {family.name} model that its config describes: {faults}. "
                "Give the config that fits (--hf-like DIR), or fetch the checkpoint again."
            )

    def __str__(self) -> str:
        """The path, for messages."""
        return str(self._folder)

    def dtype(self, canonical: str) -> torch.dtype:
        """See :class:`~isthmus.convert.canonical.CanonicalWeights`."""
        dtype: torch.dtype = self._folder.tensors[self._places[canonical].key].properties.dtype
        return dtype

    def read(self, canonical: str, rows: slice) -> Tensor:
        """See :class:`~isthmus.convert.canonical.CanonicalWeights`."""
        return self._folder.read(self._places[canonical], rows)
