"""A ``torch_dist`` checkpoint, written tensor by tensor; whoever loads it cuts it as its own layout wants.

torch's own writer would hold each tensor twice and take a checksum that nothing reads. What it puts around a tensor
depends on type and shape alone, so it is made once for each of them, and the tensor's bytes go straight into place.
"""

from __future__ import annotations

import io
import json
import math
import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.convert.canonical import own_placements, spelling_of
from isthmus.convert.legacy.torch_pickle import read_archive
from isthmus.convert.torch_dist.dcp_metadata import (
    NAME,
    Chunk,
    ChunkKey,
    FilePart,
    Index,
    ObjectEntry,
    Properties,
    TensorEntry,
    save_index,
)
from isthmus.engine.checkpoint.checkpoint_names import Place
from isthmus.errors import disk_errors
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.hf.tensors.parallel_writer import TensorWriter, reserve
from isthmus.hf.tensors.safetensors_format import TensorInfo

FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
FILES = 2
"""Tensors are dealt out over so many files: the kernel lets one thread at a time write into a file."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """What ``torch.save`` puts before and behind the bytes of a tensor."""

    before: bytes
    behind: bytes


class TorchDistFiles:
    """The files of a checkpoint: data, index, and what is no tensor."""

    def __init__(
        self,
        folder: Path,
        family: Family,
        arch: Architecture,
        dtypes: Mapping[str, torch.dtype],
        common: Mapping[str, Any],
    ) -> None:
        """Lay the files out in an existing folder.

        Args:
            folder: where.
            family: the names.
            arch: the shapes.
            dtypes: of each tensor, by canonical name.
            common: what is no tensor: ``args``, ``iteration`` and the like.

        Raises:
            NoSpace, IOFailure: the disk has no room for them, or refuses.
        """
        self._frames: dict[tuple[torch.dtype, tuple[int, ...]], _Frame] = {}
        self._folder = folder
        self._index = Index({}, {})
        self._infos: dict[str, list[TensorInfo]] = {}
        self._sizes = [0] * FILES
        self._around: list[tuple[int, int, bytes]] = []
        placements, spelling = own_placements(family, arch), spelling_of(arch)
        self.total_bytes = 0
        with disk_errors(folder):
            for name, placed in placements.items():
                shape = placed.rule.canonical_shape(arch)
                self._infos[name] = [self._lay(place, shape, dtypes[name]) for place in spelling.places(name)]
                self.total_bytes += sum(info.nbytes for info in self._infos[name])
            for key in spelling.extra_states(placements):
                self._lay_object(key)
        with disk_errors(folder, self.total_bytes):
            for number, size in enumerate(self._sizes):
                descriptor = os.open(folder / self._file(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                try:
                    reserve(descriptor, size)
                    for file, offset, content in self._around:
                        if file == number:
                            os.pwrite(descriptor, content, offset)
                finally:
                    os.close(descriptor)
            save_index(self._index, folder / NAME)
            (folder / "metadata.json").write_text(json.dumps(FORMAT), encoding="utf-8")
            torch.save(dict(common), folder / "common.pt")
        self._writer = TensorWriter(folder)

    def put(self, canonical: str, rows: slice, chunk: Tensor) -> int:
        """See :class:`~isthmus.convert.canonical.Destination`."""
        done = 0
        for info in self._infos[canonical]:
            depth = len(info.shape) - chunk.dim()
            index = (*(slice(0, 1),) * depth, rows)
            done += self._writer.write_at(info, index, chunk[(None,) * depth])
        return done

    def close(self, *, sync: bool = True) -> None:
        """See :class:`~isthmus.convert.canonical.Destination`."""
        self._writer.close(sync=sync)

    @staticmethod
    def _file(number: int) -> str:
        return f"__0_{number}.distcp"

    def _lay(self, place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> TensorInfo:
        """Find room for a tensor and enter it into the index."""
        stored = (*(1 for _ in place.index), *shape)
        frame = self._frame(dtype, stored)
        file = min(range(FILES), key=self._sizes.__getitem__)
        start = self._sizes[file]
        data = start + len(frame.before)
        info = TensorInfo(dtype, stored, Path(self._file(file)), data)
        self._around += [(file, start, frame.before), (file, data + info.nbytes, frame.behind)]
        self._sizes[file] = data + info.nbytes + len(frame.behind)
        chunk = Chunk(offsets=torch.Size((*place.index, *(0 for _ in shape))), sizes=torch.Size(stored))
        size = torch.Size((*place.sizes, *shape))
        known = self._index.state_dict_metadata.setdefault(place.key, TensorEntry(Properties(dtype), size, []))
        assert isinstance(known, TensorEntry)
        known.chunks.append(chunk)
        self._enter(ChunkKey(place.key, chunk.offsets), file, start)
        return info

    def _lay_object(self, key: str) -> None:
        """Enter an empty object into the index."""
        start = self._sizes[0]
        self._around.append((0, start, _EMPTY))
        self._sizes[0] += len(_EMPTY)
        self._index.state_dict_metadata[key] = ObjectEntry()
        self._enter(ChunkKey(key), 0, start)

    def _enter(self, key: ChunkKey, file: int, start: int) -> None:
        self._index.storage_data[key] = FilePart(self._file(file), start, self._sizes[file] - start)

    def _frame(self, dtype: torch.dtype, shape: tuple[int, ...]) -> _Frame:
        if (dtype, shape) not in self._frames:
            path = self._folder / "frame.pt"
            save_without_data(torch.empty(shape, dtype=dtype), path)
            info = read_archive(path)
            with path.open("rb") as file:
                before = file.read(info.offset)
                file.seek(info.offset + math.prod(shape) * dtype.itemsize)
                self._frames[dtype, shape] = _Frame(before, file.read())
            path.unlink()
        return self._frames[dtype, shape]


def _saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


_EMPTY = _saved([None])
"""An empty object: Megatron-Core takes the first element of a list."""


def save_without_data(content: Any, path: Path) -> None:
    """``torch.save`` with a hole where the bytes of the tensors go.

    Raises:
        OSError: the disk refuses.
    """
    with torch.serialization.skip_data():
        torch.save(content, path)


def common_content(args: Namespace) -> dict[str, Any]:
    """What Megatron-LM's loader looks for beside the tensors of a checkpoint that starts a training."""
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    return {"args": args, "checkpoint_version": 3.0, "iteration": 0, "content_metadata": content}
