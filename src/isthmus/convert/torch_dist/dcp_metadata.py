"""Reads and writes the ``.metadata`` file of a ``torch_dist`` checkpoint without importing torch.distributed.

The file is a pickle of dataclasses of ``torch.distributed.checkpoint``. The classes here have the same names and fields
and replace them, so loading runs no code of torch and saves the import (half a second).
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.serialization

from isthmus.convert.pickle_bounds import check_pickle
from isthmus.convert.torch_pickle import DTYPES_BY_NAME, PLAIN_TYPES, UnknownObject
from isthmus.errors import DataError, UnsafeInput

METADATA_FILE = ".metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"


@dataclass
class ChunkStorageMetadata:
    offsets: torch.Size
    sizes: torch.Size


class _MemoryFormat(Enum):
    """Members have torch's names, by which Python 3.11.0 to 3.11.3 pickle them: as a call of ``getattr``."""

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


def _memory_format(enumeration: Any, name: Any) -> _MemoryFormat:
    if enumeration is not _MemoryFormat or type(name) is not str:
        raise UnsafeInput("it calls getattr for more than a memory format")
    return _MemoryFormat[name]


@dataclass
class TensorProperties:
    """The dtype; the other fields of torch's class are not used."""

    dtype: torch.dtype

    def __getstate__(self) -> tuple[Any, ...]:
        # torch's fields: dtype, layout, requires_grad, memory_format, pin_memory
        return self.dtype, torch.strided, False, _MemoryFormat.TORCH_CONTIGUOUS_FORMAT, False

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]


@dataclass
class TensorStorageMetadata:
    properties: TensorProperties
    size: torch.Size
    chunks: list[ChunkStorageMetadata]


@dataclass
class BytesStorageMetadata:
    """An object that is not a tensor."""


@dataclass(frozen=True)
class MetadataIndex:
    """Key of a chunk or, without offset, of an object."""

    fqn: str
    offset: torch.Size | None = None
    index: int | None = field(default=None, compare=False)


@dataclass
class StorageInfo:
    """Location of the zip archive of a chunk, in bytes."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] | None = None


@dataclass
class StorageMeta:
    """Not used."""


@dataclass
class Metadata:
    state_dict_metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata]
    storage_data: dict[MetadataIndex, StorageInfo]
    planner_data: Any = None
    storage_meta: StorageMeta | None = None
    version: str | None = "1.0.0"


_CLASSES: dict[tuple[str, str], type] = {
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _MemoryFormat,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
}
for _class in (
    *(ChunkStorageMetadata, TensorProperties, TensorStorageMetadata, BytesStorageMetadata),
    *(MetadataIndex, StorageMeta, Metadata),
):
    _CLASSES["torch.distributed.checkpoint.metadata", _class.__name__] = _class
_OTHER_TYPES: dict[tuple[str, str], Any] = {
    **PLAIN_TYPES,
    ("torch", "strided"): torch.strided,
    ("torch", "contiguous_format"): torch.contiguous_format,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,  # Python 3.13
    ("builtins", "getattr"): _memory_format,
    ("__builtin__", "getattr"): _memory_format,  # pickle protocol 2
    # megatron-core 0.14 and 0.15, with the shapes of flattened optimizer state, which is not converted
    (_MEGATRON, "MCoreMetadata"): Metadata,
}
_PLANS = {
    ("torch.distributed.checkpoint.planner", name)
    for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
} | {(_MEGATRON, "MCoreSavePlan")}
"""The save plan that Megatron-LM caches; ignored."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _CLASSES.get((module, name)) or _OTHER_TYPES.get((module, name))
        if known is None and module == "torch":
            known = DTYPES_BY_NAME.get(name)
        if (module, name) in _PLANS:
            known = UnknownObject
        if known is None:
            raise UnsafeInput(f"it names {module}.{name}, which no checkpoint needs")
        return known


def load_metadata(path: Path) -> Metadata:
    """Run no code from the file; an UnsafeInput if it names classes other than those above."""
    try:
        raw = path.read_bytes()
        check_pickle(raw)
        metadata = _Unpickler(io.BytesIO(raw)).load()
    except UnsafeInput as error:
        raise UnsafeInput(f"{path} is refused: {error}. Do not use this checkpoint.") from None
    except Exception as error:  # a damaged pickle can cause any exception
        raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}). Fetch it again.") from None
    if not isinstance(metadata, Metadata):
        raise DataError(f"{path} is not checkpoint metadata but a {type(metadata).__name__}. Fetch it again.")
    return metadata


def save_metadata(metadata: Metadata, path: Path) -> None:
    """Write the metadata under the names of torch's classes."""
    content = pickle.dumps(metadata, protocol=2)  # names classes in lines of text, which are replaced below
    for (module, name), ours in _CLASSES.items():
        written = f"c{ours.__module__}\n{ours.__qualname__}\n".encode()
        content = content.replace(written, f"c{module}\n{name}\n".encode())
    path.write_bytes(content)
