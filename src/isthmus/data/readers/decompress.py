"""Opens and decompresses data files; the format is detected from the first bytes."""

from __future__ import annotations

import gzip
import importlib
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from isthmus.data.readers.chunks import expands_too_much, expansion_limit
from isthmus.errors import DataError, IOFailure, MissingInput
from isthmus.extras import optional_package
from isthmus.files.remote_files import open_binary

_GZIP = (b"\x1f\x8b",)
_ZSTD = (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + k]) + b"\x2a\x4d\x18" for k in range(16)))  # a frame, a skippable frame
_UNSUPPORTED = {
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf": "7z",
    b"\x04\x22\x4d\x18": "lz4",
}
_BUFFER_BYTES = 1 << 17


@contextmanager
def open_decompressed(path: Path | str) -> Iterator[BinaryIO]:
    """Open a file that is uncompressed, or compressed with gzip or Zstandard, as a stream.

    A damaged or truncated file raises DataError while it is read, one that expands beyond all measure UnsafeInput.
    """
    damaged: tuple[type[Exception], ...] = (gzip.BadGzipFile, zlib.error)
    try:
        with open_binary(path) as file:
            start = file.peek(8)[:8]
            for magic, name in _UNSUPPORTED.items():
                if start.startswith(magic):
                    raise DataError(f"{path}: compressed with {name}. Expected no compression, gzip or Zstandard.")
            if start.startswith(_GZIP):
                yield _expanded(gzip.GzipFile(fileobj=file), path)
            elif start.startswith(_ZSTD):
                zstd = _zstd(path)
                damaged = (zstd.ZstdError,)
                yield _expanded(zstd.ZstdFile(file), path)
            else:
                yield file
    except damaged as error:
        raise DataError(f"{path}: damaged: it does not decompress ({error}). Download or create it again.") from error
    except EOFError as error:
        raise DataError(f"{path}: truncated: its compressed data has no end. Download or create it again.") from error
    except FileNotFoundError as error:
        raise MissingInput(f"{path}: no such data file.") from error
    except OSError as error:
        raise IOFailure(f"{path}: cannot be read: {error.strerror or error}.") from error


class _Expanded(io.RawIOBase):
    def __init__(self, inner: Any, path: Path | str) -> None:
        self._inner, self._path = inner, path
        self.remaining_bytes = expansion_limit(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._inner.readinto(buffer)
        self.remaining_bytes -= count
        if self.remaining_bytes < 0:
            raise expands_too_much(self._path)
        return count


def _expanded(inner: Any, path: Path | str) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(_Expanded(inner, path), _BUFFER_BYTES))


def is_compressed(path: Path | str) -> bool:
    with open_binary(path) as file:
        return file.read(4).startswith(_GZIP + _ZSTD)


def _zstd(path: Path | str) -> Any:
    if sys.version_info >= (3, 14):
        return importlib.import_module("compression.zstd")
    with optional_package(f"{path}: reading Zstandard", "backports.zstd"):
        return importlib.import_module("backports.zstd")
