"""``pytorch_model*.bin``: pickles, of which the places of the tensors are taken; nothing of them is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from isthmus.convert.legacy.old_archive import read_old_archive
from isthmus.convert.legacy.torch_pickle import Strided, read_archive
from isthmus.convert.weight_source import Meta
from isthmus.errors import DataError, MissingInput
from isthmus.hf.model_folder import read_weight_map
from isthmus.hf.tensors.safetensors_format import TensorInfo
from isthmus.hf.tensors.slice_reader import TensorReader

SINGLE_FILE = "pytorch_model.bin"
INDEX_FILE = "pytorch_model.bin.index.json"


def has_bin(folder: Path) -> bool:
    """Whether the folder holds such files."""
    return (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file()


class BinWeights:
    """The tensors of a folder's ``.bin`` files; only what is asked for is read."""

    def __init__(self, folder: Path) -> None:
        """Find out where the tensors lie; tied ones lie in the same place.

        Raises:
            MissingInput: there are none.
            UnsafeInput: one names more than tensors, or the index names a file outside of the folder.
            DataError: a file is damaged, or the index does not agree with the files.
        """
        self._folder = folder
        self._reader = TensorReader()
        self._places: dict[str, TensorInfo | Strided] = {}
        if not has_bin(folder):
            raise MissingInput(f"{folder} holds no {SINGLE_FILE}. Leave --bin out, or give the folder that does.")
        weight_map: dict[str, str] = {}
        if (folder / SINGLE_FILE).is_file():
            self._places = _open(folder / SINGLE_FILE)
        else:
            weight_map = read_weight_map(folder / INDEX_FILE)
        for file in dict.fromkeys(weight_map.values()):
            found = _open(folder / file)
            if twice := found.keys() & self._places.keys():
                raise DataError(f"{folder / file} holds {min(twice)}, which another file holds already.")
            if away := [name for name, where in weight_map.items() if where == file and name not in found]:
                raise DataError(f"{folder / INDEX_FILE} places {away[0]} in {file}, which does not hold it.")
            self._places |= found
        self.tensors = {
            name: Meta(place.span.dtype if isinstance(place, Strided) else place.dtype, place.shape)
            for name, place in self._places.items()
        }

    def __str__(self) -> str:
        """The path, for messages."""
        return str(self._folder)

    def read(self, name: str, index: tuple[slice, ...] | None = None, *, into: Tensor | None = None) -> Tensor:
        """See :class:`~isthmus.convert.weight_source.WeightSource`."""
        place = self._places[name]
        if isinstance(place, TensorInfo):
            return self._reader.read(place, index, into=into)
        part = self._reader.read(place.span).as_strided(place.shape, place.strides)[index or ...]
        return part.contiguous() if into is None else into.detach().copy_(part)


def _open(path: Path) -> dict[str, TensorInfo | Strided]:
    with path.open("rb") as file:
        zipped = file.read(2) == b"PK"  # what torch writes since 1.6
    found: Any = read_archive(path, strided=True) if zipped else read_old_archive(path)
    if not isinstance(found, dict) or not all(isinstance(value, TensorInfo | Strided) for value in found.values()):
        raise DataError(f"{path} holds other things than tensors by name. Give the file of a model's weights.")
    return found
