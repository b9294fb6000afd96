"""Reading pickles that somebody else wrote: what they may name is listed here, and nothing else of them runs."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from isthmus.errors import DataError, UnsafeInput

# What the index of a torch.distributed.checkpoint consists of, with the objects that megatron-core adds to it.
_IN_AN_INDEX = {
    "torch": {"Size", "device", "strided", "contiguous_format"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
    "builtins": {"dict", "list", "set", "tuple"},
}
_TORCH_DTYPES = {name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype)}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _IN_AN_INDEX.get(module, ()) or (module == "torch" and name in _TORCH_DTYPES):
            return super().find_class(module, name)
        raise UnsafeInput(f"it names {module}.{name}, which no checkpoint needs")


def load_index(path: Path) -> Any:
    """The index (``.metadata``) of a ``torch_dist`` checkpoint.

    Raises:
        UnsafeInput: it names anything but the classes that an index is made of; nothing of it was run.
        DataError: it is cut short or no pickle.
    """
    try:
        with path.open("rb") as file:
            return _IndexUnpickler(file).load()
    except UnsafeInput as error:
        raise UnsafeInput(f"{path} is not read: {error}. Do not use this checkpoint.") from None
    except Exception as error:  # a damaged pickle can end in any exception
        raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}). Fetch it again.") from None
