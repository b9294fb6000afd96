"""Reading pickles that somebody else wrote: what they may name is listed here, and nothing else of them runs."""

from __future__ import annotations

import argparse
import io
import pickle
from pathlib import Path
from typing import Any, BinaryIO

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


def load_plain(source: Path | bytes, name: str | Path, *, mapped: bool = False) -> Any:
    """What ``torch.save`` wrote, as far as it is tensors, numbers, strings, containers and an argparse Namespace.

    Megatron-Core's own enumerations, which the arguments of a training name, are taken as well. With ``mapped`` the
    tensors of a file are mapped and not read.

    Raises:
        UnsafeInput: it holds anything else.
        DataError: it is cut short or no such file.
    """
    try:
        try:
            return _load(source, [argparse.Namespace], mapped)
        except pickle.UnpicklingError as error:
            if "GLOBAL megatron." not in str(error):
                raise
            from isthmus.engine.compat import plain_classes

            return _load(source, [argparse.Namespace, *plain_classes()], mapped)
    except pickle.UnpicklingError as error:
        if "Unsupported global" in str(error) or "Unsupported operand" in str(error):
            raise UnsafeInput(f"{name} is not read: it holds more than tensors and plain values.") from None
        raise DataError(f"{name} cannot be read ({error}). Fetch it again.") from None
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        raise DataError(f"{name} cannot be read ({type(error).__name__}: {error}). Fetch it again.") from None


def _load(source: Path | bytes, classes: list[Any], mapped: bool) -> Any:
    file: Path | BinaryIO = io.BytesIO(source) if isinstance(source, bytes) else source
    with torch.serialization.safe_globals(classes):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
