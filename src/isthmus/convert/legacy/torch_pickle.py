"""What ``torch.save`` wrote, opened without reading its tensors: each is a place in the file; nothing of it is run.

The file is a zip whose members are stored as they are: ``data.pkl`` says which tensors there are, ``data/N`` are their
bytes. The pickle may name what is listed here. Objects that only some release of Megatron or numpy knows (enumerations
among the arguments of a training, random states) become :class:`Opaque` and are not looked at.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from isthmus.errors import DataError, UnsafeInput
from isthmus.hf.tensors.safetensors_format import TensorInfo

_LOCAL_HEADER_BYTES = 30
_HARMLESS = ("megatron.", "numpy.", "transformer_engine.", "signal", "types", "enum")
"""Modules of objects that are known to lie in checkpoints; they are never imported."""
_PLAIN: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): Namespace,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): lambda *_: {},
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("builtins", "dict"): dict,
    ("builtins", "int"): int,
    ("builtins", "long"): int,  # as protocol 2 calls it
    ("builtins", "list"): list,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "bytearray"): bytearray,
    ("builtins", "complex"): complex,
}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}


class Opaque:
    """An object of a class that is not here; it keeps nothing but where it is from."""

    origin = ""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Opaque:
        """Take anything."""
        return object.__new__(cls)

    def __setstate__(self, _state: Any) -> None:
        """Take anything."""

    def __repr__(self) -> str:
        """For messages."""
        return f"<{self.origin}>"


@dataclass(frozen=True, slots=True)
class Strided:
    """A tensor whose elements do not lie in their order: the stretch of the file that they lie in, and how."""

    span: TensorInfo
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_archive(path: Path, offset: int = 0, length: int | None = None, *, strided: bool = False) -> Any:
    """The object that was saved, with a ``TensorInfo`` in the place of every tensor.

    Args:
        path: the file.
        offset: where in the file the archive begins, in bytes.
        length: its bytes; None for all that follow.
        strided: take tensors that are not contiguous too, as :class:`Strided`.

    Raises:
        UnsafeInput: it names anything but tensors, plain values and what is known to lie in checkpoints.
        DataError: it is cut short, no such archive, or its tensors do not lie where they should.
    """
    with reading(path), path.open("rb") as file:
        window = _Window(file, offset, path.stat().st_size - offset if length is None else length)
        return _Archive(path, offset, window, strided).load()


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong while a pickle in ``path`` is read into an error for the user."""
    try:
        yield
    except UnsafeInput as error:
        raise UnsafeInput(f"{path} is not read: {error}. Do not use this checkpoint.") from None
    except DataError as error:
        raise DataError(f"{path} cannot be read: {error}. Fetch it again.") from None
    except zipfile.BadZipFile as error:
        raise DataError(
            f"{path} is cut short or was not written by torch.save since 1.6 ({error}). "
            "Fetch it again; a file of an older torch has to be loaded and saved by a newer one."
        ) from None
    except Exception as error:  # a damaged pickle can end in any exception
        raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}). Fetch it again.") from None


class _Window(io.RawIOBase):
    """A stretch of a file as a file of its own."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, at: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + at < 0:
            raise OSError("seek before the beginning")
        self._at = base + at
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        room = min(len(buffer), max(0, self._length - self._at))
        got = self._file.readinto(memoryview(buffer)[:room])  # type: ignore[attr-defined]
        self._at += got
        return int(got)


class Places(pickle.Unpickler):
    """Puts places into the pickle where tensors were; what follows from a format is where a storage begins."""

    def __init__(self, path: Path, pickled: BinaryIO, strided: bool = False) -> None:
        """Read ``pickled``, which is about the file at ``path``; see :func:`read_archive` on ``strided``."""
        self._path, self._strided = path, strided
        super().__init__(pickled)

    def find_class(self, module: str, name: str) -> Any:
        """What a name in the pickle stands for."""
        if module == "__builtin__":  # as protocol 2, which torch.save uses, calls it
            module = "builtins"
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor"):
            return self._tensor
        if (module, name) in (("torch._utils", "_rebuild_parameter"), ("torch", "Tensor")):
            return lambda data, *_rest: data
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        if (module, name) == ("_io", "BytesIO") or f"{module}.".startswith(_HARMLESS):
            return type(name, (Opaque,), {"origin": f"{module}.{name}"})
        raise UnsafeInput(f"it names {module}.{name}, which no checkpoint needs")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, str, int]:
        """A storage by dtype, key and number of elements."""
        kind, dtype, key, _device, numel, *view = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise UnsafeInput(f"it names a {kind} that is no storage")
        if any(view):
            raise DataError(f"storage {key} is a part of another")
        return dtype, str(key), int(numel)

    def storage_offset(self, key: str, num_bytes: int) -> int:
        """Where a storage of so many bytes begins in the file.

        Raises:
            DataError: it is not there, or of another size.
        """
        raise DataError(f"tensor {key} lies nowhere")

    def _tensor(
        self, storage: tuple[torch.dtype, str, int], at: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
    ) -> TensorInfo | Strided:
        dtype, key, numel = storage
        start = self.storage_offset(key, numel * dtype.itemsize) + at * dtype.itemsize
        contiguous = _contiguous(shape, strides)
        if not contiguous and not self._strided:
            raise DataError(f"tensor {key} is not contiguous (strides {tuple(strides)} for {tuple(shape)})")
        # From the first of the elements to the last.
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 if all(shape) else 0
        if at < 0 or min(strides, default=0) < 0 or at + reach > numel:
            raise DataError(f"tensor {key} has {numel} elements, {at + reach} are needed")
        if contiguous:
            return TensorInfo(dtype, tuple(shape), self._path, start)
        return Strided(TensorInfo(dtype, (reach,), self._path, start), tuple(shape), tuple(strides))


class _Archive(Places):
    """The pickle of a zip."""

    def __init__(self, path: Path, offset: int, window: _Window, strided: bool) -> None:
        self._offset, self._window = offset, window
        self._zip = zipfile.ZipFile(io.BufferedReader(window))
        members = self._zip.namelist()
        pickles = [name for name in members if name.endswith("data.pkl") and name.count("/") <= 1]
        if len(pickles) != 1:
            raise DataError("it holds no data.pkl")
        self._root = pickles[0].removesuffix("data.pkl")
        if f"{self._root}byteorder" in members and self._zip.read(f"{self._root}byteorder") != b"little":
            raise DataError("its numbers are big-endian, little-endian ones are read")
        super().__init__(path, io.BytesIO(self._zip.read(pickles[0])), strided)

    def storage_offset(self, key: str, num_bytes: int) -> int:
        """See :class:`Places`."""
        member = self._zip.getinfo(f"{self._root}data/{key}")
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != num_bytes:
            raise DataError(f"tensor {key} has {member.file_size} bytes, {num_bytes} are needed")
        # The local header repeats the name and may have a longer extra field than the one in the directory.
        self._window.seek(member.header_offset)
        header = self._window.read(_LOCAL_HEADER_BYTES)
        if header is None or header[:4] != b"PK\x03\x04":
            raise DataError(f"tensor {key} is not where the directory says")
        skipped = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return self._offset + member.header_offset + _LOCAL_HEADER_BYTES + skipped


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != step:
            return False
        step *= max(size, 1)
    return True


def _latin1(text: str, encoding: str) -> bytes:
    """How pickle writes bytes in its protocol 2."""
    if encoding != "latin1":
        raise UnsafeInput(f"it names the encoding {encoding}")
    return text.encode("latin1")
