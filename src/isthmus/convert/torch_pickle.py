"""Reads files of ``torch.save`` without running code from them; tensors become file offsets.

A file is an uncompressed zip: ``data.pkl`` names the tensors, ``data/N`` has their bytes. The pickle may name only the
types in this module; objects of Megatron, numpy etc. become :class:`UnknownObject`.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isthmus.convert.pickle_bounds import check_pickle
from isthmus.errors import DataError, IOFailure, UnsafeInput
from isthmus.files.checked_files import ChecksumVerifier
from isthmus.hf.tensors.safetensors_format import TensorInfo

_LOCAL_HEADER_BYTES = 30
_NOT_IMPORTED = ("megatron.", "numpy.", "transformer_engine.", "signal", "types", "enum")
"""Modules whose objects are replaced by :class:`UnknownObject`."""


def _flat_tuple(*items: Any) -> tuple[Any, ...]:
    """``tuple`` for pickles; its argument hides what it nests from :func:`check_pickle`."""
    result = tuple(*items)
    if any(isinstance(item, tuple) for item in result):
        raise DataError("it makes a tuple of tuples from another collection")
    return result


PLAIN_TYPES: dict[tuple[str, str], Any] = {
    ("collections", "defaultdict"): lambda *_: {},
    ("builtins", "tuple"): _flat_tuple,
    ("builtins", "long"): int,  # the name in pickle protocol 2
}
_BUILTINS = (dict, int, list, set, frozenset, bytearray, complex)
for _type in (*_BUILTINS, OrderedDict, Namespace, torch.Size, torch.device):
    PLAIN_TYPES[_type.__module__, _type.__name__] = _type
DTYPES_BY_NAME = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_STORAGE_DTYPES = {**torch.storage._storage_type_to_dtype_map(), "UntypedStorage": torch.uint8}


class UnknownObject:
    """Placeholder for an object whose class is not imported."""

    class_name = ""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> UnknownObject:
        return object.__new__(cls)

    def __setstate__(self, _state: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"<{self.class_name}>"


@dataclass(frozen=True, slots=True)
class StridedTensor:
    """A non-contiguous tensor: the bytes from its first to its last element, and its strides."""

    span: TensorInfo
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch_pickle(
    path: Path,
    offset: int = 0,
    length: int | None = None,
    *,
    strided: bool = False,
    verifier: ChecksumVerifier | None = None,
    tensor: str = "",
) -> Any:
    """Load a file of ``torch.save`` with a ``TensorInfo`` in place of each tensor.

    The zip archive has ``length`` bytes (None: the rest of the file) from ``offset``. ``strided`` allows non-contiguous
    tensors, as :class:`StridedTensor`. ``verifier`` (default: one of its own) checks what is read, and names ``tensor``
    if it is damaged. Raises UnsafeInput if the pickle names other types, DataError if it is damaged.
    """
    advice = "Fetch it again"
    try:
        with _Window(path, offset, length, verifier or ChecksumVerifier(), tensor) as window:
            if window.read(2) != b"PK":
                advice = "Load it and save it again with torch >= 1.6, or fetch it again"
                raise DataError("it is not a zip archive, so it is damaged or torch < 1.6 wrote it")
            return _TensorUnpickler(path, window, strided).load()
    except IOFailure:
        raise
    except UnsafeInput as error:
        raise UnsafeInput(f"{path} is refused: {error}. Do not use this checkpoint.") from None
    except DataError as error:
        if str(path) in str(error):  # of its checksums
            raise
        raise DataError(f"{path} cannot be read: {error}. {advice}.") from None
    except Exception as error:  # a damaged file can cause any exception
        raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}). Fetch it again.") from None


def args_in(state: Any) -> dict[str, Any] | None:
    """Megatron-LM's args in the contents of a checkpoint file; None if it has none."""
    args = state.get("args") if isinstance(state, dict) else None
    return dict(args if isinstance(args, dict) else vars(args)) if args is not None else None


def save_without_data(content: Any, path: Path) -> None:
    """``torch.save`` that leaves holes in the file for the bytes of the tensors."""
    with torch.serialization.skip_data():
        torch.save(content, path)


class _Window(io.FileIO):
    """A file, opened at ``offset``, that ends after ``length`` bytes; ``zipfile`` finds an archive at its end."""

    def __init__(self, path: Path, offset: int, length: int | None, verifier: ChecksumVerifier, tensor: str) -> None:
        super().__init__(path)
        self._path, self._verifier, self._tensor = path, verifier, tensor
        self._end = path.stat().st_size if length is None else offset + length
        self.seek(offset)

    def seek(self, at: int, whence: int = io.SEEK_SET) -> int:
        return super().seek(self._end + at) if whence == io.SEEK_END else super().seek(at, whence)

    def read(self, size: int | None = -1) -> bytes:
        at = self.tell()
        remaining = max(0, self._end - at)
        num_bytes = remaining if size is None or size < 0 else min(size, remaining)
        self._verifier.check(self._path, at, at + num_bytes, tensor=self._tensor)
        return super().read(num_bytes)


class _TensorUnpickler(pickle.Unpickler):
    """Replaces tensors with file offsets, and refuses names that are not listed."""

    def __init__(self, path: Path, window: _Window, strided: bool) -> None:
        self._path, self._window, self._strided = path, window, strided
        self._zip = zipfile.ZipFile(window)
        members = self._zip.namelist()
        pickles = [name for name in members if name.endswith("data.pkl") and name.count("/") <= 1]
        if len(pickles) != 1:
            raise DataError("it has no data.pkl")
        self._root = pickles[0].removesuffix("data.pkl")
        if f"{self._root}byteorder" in members and self._zip.read(f"{self._root}byteorder") != b"little":
            raise DataError("its numbers are big-endian; only little-endian is supported")
        if any(self._zip.getinfo(name).compress_type != zipfile.ZIP_STORED for name in pickles):
            raise DataError("its data.pkl is compressed, as torch.save never does")
        raw = self._zip.read(pickles[0])
        check_pickle(raw)
        super().__init__(io.BytesIO(raw))

    def find_class(self, module: str, name: str) -> Any:
        if module == "__builtin__":  # the name in pickle protocol 2, which torch.save uses
            module = "builtins"
        if (module, name) in PLAIN_TYPES:
            return PLAIN_TYPES[module, name]
        if module == "torch" and name in DTYPES_BY_NAME:
            return DTYPES_BY_NAME[name]
        if module in ("torch", "torch.storage") and name in _STORAGE_DTYPES:
            return _STORAGE_DTYPES[name]
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor"):
            return self._tensor
        if (module, name) in (("torch._utils", "_rebuild_parameter"), ("torch", "Tensor")):
            return lambda data, *_rest: data
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        if (module, name) == ("_io", "BytesIO") or f"{module}.".startswith(_NOT_IMPORTED):
            return type(name, (UnknownObject,), {"class_name": f"{module}.{name}"})
        raise UnsafeInput(f"it names {module}.{name}, which no checkpoint needs")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, str, int]:
        """Dtype, key and number of elements of a storage."""
        kind, dtype, key, _device, numel, *view = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise UnsafeInput(f"it names a {kind} that is no storage")
        if any(view):
            raise DataError(f"storage {key} is part of another storage")
        return dtype, str(key), int(numel)

    def _storage_offset(self, key: str, num_bytes: int) -> int:
        member = self._zip.getinfo(f"{self._root}data/{key}")
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != num_bytes:
            raise DataError(f"tensor {key} has {member.file_size} bytes, {num_bytes} are needed")
        # The local header repeats the name, and its extra field may be longer than the one in the zip directory.
        self._window.seek(member.header_offset)
        header = self._window.read(_LOCAL_HEADER_BYTES)
        if header[:4] != b"PK\x03\x04":
            raise DataError(f"tensor {key} is not at the offset in the zip directory")
        skipped = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return member.header_offset + _LOCAL_HEADER_BYTES + skipped

    def _tensor(
        self, storage: tuple[torch.dtype, str, int], at: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
    ) -> TensorInfo | StridedTensor:
        dtype, key, numel = storage
        start = self._storage_offset(key, numel * dtype.itemsize) + at * dtype.itemsize
        meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")  # refuses negative sizes and strides
        if not meta.is_contiguous() and not self._strided:
            raise DataError(f"tensor {key} is not contiguous (strides {tuple(strides)} for {tuple(shape)})")
        reach = meta.untyped_storage().nbytes() // dtype.itemsize
        if at < 0 or at + reach > numel:
            raise DataError(f"tensor {key} has {numel} elements, {at + reach} are needed")
        if meta.is_contiguous():
            return TensorInfo(dtype, tuple(shape), self._path, start)
        return StridedTensor(TensorInfo(dtype, (reach,), self._path, start), tuple(shape), tuple(strides))


def _latin1(text: str, encoding: str) -> bytes:
    """How pickle protocol 2 encodes bytes."""
    if encoding != "latin1":
        raise UnsafeInput(f"it names the encoding {encoding}")
    return text.encode("latin1")
