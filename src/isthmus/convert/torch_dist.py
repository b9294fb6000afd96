"""Megatron's ``torch_dist`` files, read and written tensor by tensor without a model or a process group."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, Metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from isthmus.convert.pickles import load_index, load_plain
from isthmus.engine.names import TRACKER
from isthmus.errors import DataError, MissingInput, UnsafeInput

FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def checkpoint_folder(path: Path) -> Path | None:
    """The folder with the files: ``path`` itself, or the one that the tracker file in it names; None if neither is.

    Raises:
        DataError: the tracker file names a checkpoint that is not there.
    """
    if (path / ".metadata").is_file() or any(path.glob("mp_rank_*")):
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
        """Read the index and see that every file is there and long enough.

        Raises:
            MissingInput: there is no index.
            UnsafeInput: the index runs code or names files elsewhere.
            DataError: the index cannot be read, or a file is missing or cut short.
        """
        self.path = path
        if not (path / ".metadata").is_file():
            raise MissingInput(
                f"{path} holds no .metadata, so it is no torch_dist checkpoint. Choose a folder that is."
            )
        index = load_index(path / ".metadata")
        try:
            self.tensors: dict[str, TensorStorageMetadata] = {
                key: entry for key, entry in index.state_dict_metadata.items() if hasattr(entry, "chunks")
            }
            self._stored: Mapping[MetadataIndex, Any] = index.storage_data
            self._check_files()
        except (AttributeError, TypeError) as error:
            raise DataError(
                f"{path / '.metadata'} is not the index of a checkpoint ({error}). Fetch it again."
            ) from None
        self._last: tuple[MetadataIndex, Tensor] | None = None

    def __str__(self) -> str:
        """The path, for messages."""
        return str(self.path)

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for entry in self._stored.values():
            ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
        for name, end in ends.items():
            as_path = PurePosixPath(name)
            if as_path.is_absolute() or ".." in as_path.parts or (self.path / name).is_symlink():
                raise UnsafeInput(f"{self.path / '.metadata'} names {name!r}, which may lie outside. Do not use it.")
            size = (self.path / name).stat().st_size if (self.path / name).is_file() else -1
            if size < end:
                found = "is missing" if size < 0 else f"has {size} bytes"
                raise DataError(f"{self.path / name} {found}, {end} are needed. Fetch it again.")

    def shape(self, key: str, layer: int | None) -> tuple[int, ...]:
        """Shape of a tensor, without the axis of the layers if it is one of a stack."""
        return tuple(self.tensors[key].size)[0 if layer is None else 1 :]

    def read(self, key: str, layer: int | None) -> Tensor:
        """The whole tensor, or the one of a layer in a stack, put together from its chunks.

        Raises:
            DataError: chunks are missing or damaged.
        """
        meta = self.tensors[key]
        found = torch.empty(self.shape(key, layer), dtype=meta.properties.dtype)
        filled = 0
        for chunk in meta.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if layer is not None and not offsets[0] <= layer < offsets[0] + sizes[0]:
                continue
            tensor = self._chunk(key, chunk)
            if layer is not None:
                tensor, offsets, sizes = tensor[layer - offsets[0]], offsets[1:], sizes[1:]
            target = found[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
            if target.shape != tensor.shape:
                raise DataError(
                    f"{self}: a chunk of {key} is {list(tensor.shape)}, not {list(target.shape)}. Fetch it again."
                )
            target.copy_(tensor)
            filled += tensor.numel()
        if filled != found.numel():
            raise DataError(f"{self}: the chunks of {key} hold {filled} elements of {found.numel()}. Fetch it again.")
        return found

    def _chunk(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        place = MetadataIndex(key, chunk.offsets)
        if self._last is not None and self._last[0] == place:  # a stack in one chunk: its layers are read in a row
            return self._last[1]
        if place not in self._stored:
            raise DataError(f"{self}: a chunk of {key} is in none of its files. Fetch it again.")
        entry = self._stored[place]
        with (self.path / entry.relative_path).open("rb") as file:
            file.seek(entry.offset)
            tensor = load_plain(file.read(entry.length), f"{self.path / entry.relative_path}: {key}")
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != tuple(chunk.sizes):
            raise DataError(f"{self}: a chunk of {key} is not the tensor that the index promises. Fetch it again.")
        self._last = (place, tensor) if math.prod(chunk.sizes[:1]) > 1 else None
        return tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor to be written, whole."""

    canonical: str
    key: str
    layer: int | None
    num_layers: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True)
class _Planner:
    """What the writer asks for the content of an item when its turn comes."""

    entries: Mapping[MetadataIndex, Entry]
    load: Callable[[Entry], Tensor]

    def resolve_data(self, item: WriteItem) -> Tensor | io.BytesIO:
        if item.type == WriteItemType.BYTE_IO:
            empty = io.BytesIO()
            torch.save([None], empty)  # a list: Megatron-Core takes its first element
            return empty
        entry = self.entries[item.index]
        tensor = self.load(entry)
        return tensor if entry.layer is None else tensor[None]


def write_torch_dist(
    folder: Path, entries: Iterable[Entry], objects: Iterable[str], common: Mapping[str, Any],
    load: Callable[[Entry], Tensor],
) -> None:  # fmt: skip
    """Write a checkpoint into an existing folder, one tensor at a time.

    Args:
        folder: gets ``.metadata``, ``metadata.json``, ``common.pt`` and the data.
        entries: the tensors, in the order in which they are loaded and written.
        objects: keys of the empty objects beside them.
        common: what is no tensor: ``args``, ``iteration`` and the like.
        load: gives the tensor of an entry when its turn comes.

    Raises:
        OSError: the disk refuses; ``hf.staged.disk_errors`` turns it into an error for the user.
    """
    placed: dict[MetadataIndex, Entry] = {}
    items: list[WriteItem] = []
    index: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for entry in entries:
        stacked = entry.layer is not None
        size = torch.Size((entry.num_layers, *entry.shape) if stacked else entry.shape)
        chunk = ChunkStorageMetadata(
            offsets=torch.Size(
                ((entry.layer or 0), *(0 for _ in entry.shape)) if stacked else (0 for _ in entry.shape)
            ),
            sizes=torch.Size((1, *entry.shape) if stacked else entry.shape),
        )
        properties = TensorProperties(dtype=entry.dtype)
        place = MetadataIndex(entry.key, chunk.offsets)
        placed[place] = entry
        items.append(WriteItem(place, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, size)))
        known = index.setdefault(entry.key, TensorStorageMetadata(properties, size, []))
        assert isinstance(known, TensorStorageMetadata)
        known.chunks.append(chunk)
    for key in objects:
        items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
        index[key] = BytesStorageMetadata()
    # One thread: in torch's writer the error of a second one is lost.
    writer = FileSystemWriter(folder, thread_count=1, sync_files=True, overwrite=False)
    writer.set_up_storage_writer(True)
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan(items))])
    planner: Any = _Planner(placed, load)
    results = writer.write_data(plan, planner).wait()
    writer.finish(Metadata(index), [results])
    (folder / "metadata.json").write_text(json.dumps(FORMAT), encoding="utf-8")
    torch.save(dict(common), folder / "common.pt")
