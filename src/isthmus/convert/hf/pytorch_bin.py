"""Reads ``pytorch_model*.bin`` without running code from these pickles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from isthmus.convert.torch_pickle import StridedTensor, read_torch_pickle
from isthmus.convert.weight_source import TensorSpec
from isthmus.errors import DataError, MissingInput
from isthmus.hf.model_folder import read_weight_map
from isthmus.hf.tensors.safetensors_format import TensorInfo
from isthmus.hf.tensors.slice_reader import TensorReader

SINGLE_FILE = "pytorch_model.bin"
INDEX_FILE = "pytorch_model.bin.index.json"


def has_bin(folder: Path) -> bool:
    return (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file()


class BinWeights:
    """Tensors of ``.bin`` files, read slice by slice; tied tensors share their bytes in the file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = TensorReader()
        if not has_bin(folder):
            raise MissingInput(f"{folder} has no {SINGLE_FILE}. Omit --bin, or give the folder that has it.")
        single = (folder / SINGLE_FILE).is_file()
        self._found = _open(folder / SINGLE_FILE) if single else {}
        weight_map = {} if single else read_weight_map(folder / INDEX_FILE)
        for file in dict.fromkeys(weight_map.values()):
            found = _open(folder / file)
            if twice := found.keys() & self._found.keys():
                raise DataError(f"{folder / file} has {min(twice)}, which another file has too.")
            if absent := [name for name, where in weight_map.items() if where == file and name not in found]:
                raise DataError(f"{folder / INDEX_FILE} places {absent[0]} in {file}, which does not have it.")
            self._found |= found
        self.tensors = {
            name: TensorSpec(info.span.dtype if isinstance(info, StridedTensor) else info.dtype, info.shape)
            for name, info in self._found.items()
        }

    def __str__(self) -> str:
        return str(self._folder)

    def read(self, name: str, index: tuple[slice, ...] | None = None, *, into: Tensor | None = None) -> Tensor:
        info = self._found[name]
        if isinstance(info, TensorInfo):
            return self._reader.read(info, index, into=into)
        part = self._reader.read(info.span).as_strided(info.shape, info.strides)[index or ...]
        return part.contiguous() if into is None else into.detach().copy_(part)


def _open(path: Path) -> dict[str, TensorInfo | StridedTensor]:
    found: Any = read_torch_pickle(path, strided=True)
    if not isinstance(found, dict) or not all(
        isinstance(value, TensorInfo | StridedTensor) for value in found.values()
    ):
        raise DataError(f"{path} has other things than tensors by name. Give the file of a model's weights.")
    return found
