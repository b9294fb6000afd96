"""The index (``.metadata``) of a ``torch_dist`` checkpoint, read and written without torch.distributed.

It is a pickle of the dataclasses of ``torch.distributed.checkpoint``. The records here have their fields and stand in
their place: nothing of torch's is called by a file that somebody else wrote, and the half second that importing it
takes is saved. What else the pickle may name is listed here.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.serialization

from isthmus.convert.legacy.torch_pickle import Opaque
from isthmus.errors import DataError, UnsafeInput

NAME = ".metadata"


@dataclass
class Chunk:
    """A rectangle of a tensor that lies in one piece."""

    offsets: torch.Size
    sizes: torch.Size


class _MemoryFormat(Enum):
    CONTIGUOUS = 0
    CHANNELS_LAST = 1
    PRESERVE = 2


@dataclass
class Properties:
    """What a tensor is besides its size; torch keeps more, none of which is used any longer."""

    dtype: torch.dtype

    def __getstate__(self) -> tuple[Any, ...]:
        """Fields of torch's class: dtype, layout, requires_grad, memory_format, pin_memory."""
        return self.dtype, torch.strided, False, _MemoryFormat.CONTIGUOUS, False

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Take the first."""
        self.dtype = state[0]


@dataclass
class TensorEntry:
    """A tensor and the chunks that make it up."""

    properties: Properties
    size: torch.Size
    chunks: list[Chunk]


@dataclass
class ObjectEntry:
    """Something that is no tensor."""


@dataclass(frozen=True)
class ChunkKey:
    """Names a chunk by its tensor and where it begins there, or an object."""

    fqn: str
    offset: torch.Size | None = None
    index: int | None = field(default=None, compare=False)


@dataclass
class FilePart:
    """Where the archive of a chunk lies, in bytes."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] | None = None


@dataclass
class Origin:
    """Who saved it."""


@dataclass
class Index:
    """All of it."""

    state_dict_metadata: dict[str, TensorEntry | ObjectEntry]
    storage_data: dict[ChunkKey, FilePart]
    planner_data: Any = None
    storage_meta: Origin | None = None
    version: str | None = "1.0.0"


_RECORDS: Mapping[tuple[str, str], type] = {
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"): Chunk,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _MemoryFormat,
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): Properties,
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"): TensorEntry,
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"): ObjectEntry,
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"): ChunkKey,
    ("torch.distributed.checkpoint.metadata", "StorageMeta"): Origin,
    ("torch.distributed.checkpoint.metadata", "Metadata"): Index,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): FilePart,
}
_PLAIN: Mapping[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch", "strided"): torch.strided,
    ("torch", "contiguous_format"): torch.contiguous_format,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "set"): set,
    ("builtins", "tuple"): tuple,
}
_PLANS = {
    ("torch.distributed.checkpoint.planner", name)
    for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
}
"""Megatron-LM keeps the plan that it wrote by, to write by it again; it is passed over."""
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _RECORDS.get((module, name)) or _PLAIN.get((module, name))
        if found is None and module == "torch":
            found = _DTYPES.get(name)
        if (module, name) in _PLANS:
            found = Opaque
        if found is None:
            raise UnsafeInput(f"it names {module}.{name}, which no checkpoint needs")
        return found


def load_index(path: Path) -> Index:
    """Read an index.

    Raises:
        UnsafeInput: it names anything but the classes that an index is made of; nothing of it was run.
        DataError: it is cut short, no pickle, or of something else.
    """
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except UnsafeInput as error:
        raise UnsafeInput(f"{path} is not read: {error}. Do not use this checkpoint.") from None
    except Exception as error:  # a damaged pickle can end in any exception
        raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}). Fetch it again.") from None
    if not isinstance(found, Index):
        raise DataError(f"{path} is not the index of a checkpoint but a {type(found).__name__}. Fetch it again.")
    return found


def save_index(index: Index, path: Path) -> None:
    """Write an index that torch reads as one of its own.

    Raises:
        OSError: the disk refuses.
    """
    content = pickle.dumps(index, protocol=2)  # names classes in lines of text, which can be put right
    for (module, name), record in _RECORDS.items():
        ours = f"c{record.__module__}\n{record.__qualname__}\n".encode()
        content = content.replace(ours, f"c{module}\n{name}\n".encode())
    path.write_bytes(content)
