"""Reads the index ``.metadata`` of a ``torch_dist`` checkpoint, a pickle, without running code that it names."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.serialization
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from isthmus.errors import DataError, UnsafeInput

INDEX = ".metadata"
_CLASSES: dict[tuple[str, str], Any] = {
    (metadata.__name__, name): getattr(metadata, name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): Path,
    ("pathlib", "PurePosixPath"): Path,
    ("pathlib._local", "PosixPath"): Path,  # Python 3.13
    ("collections", "OrderedDict"): dict,
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _CLASSES:
            raise UnsafeInput(f"names {module}.{name}, which no index needs. Do not load this checkpoint.")
        return _CLASSES[module, name]


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint: afterwards, torch and Megatron-Core may unpickle the same file.

    Raises:
        UnsafeInput: it names a class or function that is not part of an index.
        DataError: it is damaged.
    """
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
        if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
            raise ValueError("it has no list of tensors")
    except UnsafeInput as error:
        raise UnsafeInput(f"{path} {error}") from None
    except Exception as error:  # a damaged pickle raises almost any
        raise DataError(f"{path} cannot be read ({error}). Resume from another checkpoint.") from error
    return index
