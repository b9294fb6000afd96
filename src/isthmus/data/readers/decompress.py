"""Data files open_decompressed as bytes: as they are, or unpacked when they begin like gzip or Zstandard.

Unpacking is done a piece at a time, so memory does not grow with the file, and a file that was cut short is an error.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from isthmus.errors import DataError, IOFailure, MissingInput, UsageError

_GZIP = (b"\x1f\x8b",)
_ZSTD = (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + k]) + b"\x2a\x4d\x18" for k in range(16)))  # a frame, one to be skipped
_FOREIGN = {
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf": "7z",
    b"\x04\x22\x4d\x18": "lz4",
}
_PACKED_BYTES = 1 << 14  # unpacked at once: small, since a few bytes of Zstandard may stand for very many
PACKED_SUFFIXES = (".gz", ".gzip", ".zst", ".zstd")


@contextmanager
def open_decompressed(path: Path | str) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked.

    Raises:
        MissingInput: there is no such file.
        DataError: it is packed in another way, or (while it is read) damaged or cut short.
        UsageError: it is Zstandard, and the library for it is not installed.
        IOFailure: reading failed.
    """
    try:
        with Path(path).open("rb") as file:
            start = file.peek(8)[:8]
            for magic, name in _FOREIGN.items():
                if start.startswith(magic):
                    raise DataError(f"{path}: packed with {name}. Wanted it as it is, or packed with gzip or zstd.")
            if start.startswith(_GZIP):
                yield _stream(path, file, lambda: zlib.decompressobj(wbits=31), zlib.error)
            elif start.startswith(_ZSTD):
                zstandard = _zstandard(path)
                make = zstandard.ZstdDecompressor().decompressobj
                yield _stream(path, file, make, zstandard.ZstdError)
            else:
                yield file
    except FileNotFoundError as error:
        raise MissingInput(f"{path}: no such data file.") from error
    except OSError as error:
        raise IOFailure(f"{path}: cannot be read: {error.strerror or error}.") from error


def is_compressed(path: Path | str) -> bool:
    """Whether a file that can be open_decompressed begins like gzip or Zstandard."""
    with Path(path).open("rb") as file:
        return file.read(4).startswith(_GZIP + _ZSTD)


def unpacked_name(path: Path) -> str:
    """The name of a file without what only says how it is packed."""
    return path.stem if path.suffix in PACKED_SUFFIXES else path.name


class _Pieces(io.RawIOBase):
    """An iterator of bytes, as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _stream(path: Path | str, file: BinaryIO, make: Callable[[], Any], broken: type[Exception]) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(_Pieces(_unpacked(path, file, make, broken)), buffer_size=1 << 17))


def _unpacked(path: Path | str, file: BinaryIO, make: Callable[[], Any], broken: type[Exception]) -> Iterator[bytes]:
    """What a packed file holds; several packed one after the other are one."""
    unpacker, rest = make(), b""
    try:
        while True:
            raw = rest or file.read(_PACKED_BYTES)
            if not raw:
                break
            if unpacker.eof:
                if not raw.strip(b"\x00"):  # what tapes and block devices are filled up with
                    rest = b""
                    continue
                unpacker = make()
            yield unpacker.decompress(raw)
            rest = unpacker.unused_data if unpacker.eof else b""
    except broken as error:
        raise DataError(f"{path}: damaged: it does not unpack ({error}). Fetch or make it anew.") from error
    if not unpacker.eof:
        raise DataError(f"{path}: cut short: its packed data has no end. Fetch or make it anew.")


def _zstandard(path: Path | str) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise UsageError(f"{path}: reading Zstandard needs zstandard: pip install 'isthmus[data]'.") from error
    return zstandard
