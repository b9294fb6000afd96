"""Files that are checked against the ``checksums.json`` of their folder, block by block while they are read.

::

    verifier = ChecksumVerifier()                   # for as long as the files are open; remembers checked blocks
    config = json.loads(verifier.read_bytes(folder / "config.json"))
    verifier.check(folder / "model.pt", offset, offset + length, tensor="lm_head.weight")

Files in no list (of other programs, or added later) are read unchecked.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from isthmus.errors import DataError, IOFailure
from isthmus.files.file_checksums import (
    CHECKSUMS,
    HASH_BYTES,
    HINT,
    THREADS,
    FileChecksums,
    WrittenBlocks,
    hash_block,
    hash_file,
    read_checksums,
)
from isthmus.files.input_files import check_regular
from isthmus.files.packed_checksums import packed, unpacked

_MANY_BLOCKS = 64
"""From this number of blocks on, threads check them."""


class ChecksumVerifier:
    """Checks files before or while they are read; thread-safe. Reads each block once, and each list once."""

    def __init__(self) -> None:
        self._lists: dict[Path, dict[str, FileChecksums]] = {}
        self._files: dict[Path, ListedFile] = {}
        self._lock = threading.Lock()

    def file(self, path: Path) -> ListedFile | None:
        """The file with its checksums; None if no list has it, or checksums are not checked.

        Raises:
            DataError: the list in its folder is damaged, or the file is missing or has another size.
            UnsafeInput: the list is hostile.
            IOFailure: reading failed.
        """
        with self._lock:
            if path not in self._files and (listed := self._list(path.parent).get(path.name)) is not None:
                with _read_errors(path):
                    _check_size(path, listed, path.stat().st_size if path.is_file() else None)
                self._files[path] = ListedFile(path, listed)
            listed_file = None if _trusted else self._files.get(path)
            return listed_file if _recorder is None else _recorder.add(path, listed_file)

    def check(self, path: Path, start: int = 0, stop: int | None = None, *, tensor: str = "") -> None:
        """Check the blocks with bytes ``start`` to ``stop`` (default: the end) of a file; raises as ``file``.

        ``tensor`` names what is read, for the message. Files in no list are not checked.
        """
        if (listed := self.file(path)) is not None:
            listed.check(start, listed.checksums.size if stop is None else stop, tensor)

    def check_folder(self, folder: Path, *, only: Callable[[str], bool] = lambda name: True) -> None:
        """Check that the listed files of a folder for whose name ``only`` is true exist, and their content.

        Raises as ``file``.
        """
        for file in self.check_complete(folder, only=only):
            file.check(0, file.checksums.size)

    def check_complete(self, folder: Path, *, only: Callable[[str], bool] = lambda name: True) -> list[ListedFile]:
        """As ``check_folder``, but of the content only the size; returns the files."""
        with self._lock:
            listed = sorted(self._list(folder))
        files = [self.file(folder / name) for name in listed if only(name)]
        return [file for file in files if file is not None]

    def read_bytes(self, path: Path) -> bytes:
        """The whole content of a file, checked; raises the OSErrors of ``Path.read_bytes``, and as ``file``."""
        check_regular(path)
        content = path.read_bytes()
        if (listed := self.file(path)) is not None:
            _check_size(path, listed.checksums, len(content))
            listed.compare(0, memoryview(content))
        return content

    def listed(self, folder: Path, name: str) -> ListedFile | None:
        """A file of the list of ``folder`` that is stored elsewhere; None if it is not listed."""
        with self._lock:
            checksums = self._list(folder).get(name)
        return None if checksums is None else ListedFile(folder / name, checksums)

    def packed_list(self, folder: Path) -> bytes:
        """The list of a folder for :meth:`use_packed_list` of other processes; raises as ``file``."""
        with self._lock:
            return packed(self._list(folder))

    def use_packed_list(self, folder: Path, content: memoryview) -> None:
        """Use a list of another process that has checked it, in place of reading the list of a folder."""
        with self._lock:
            self._lists[folder] = unpacked(content)

    def has_list(self, folder: Path) -> bool:
        """Whether there are checksums, and they are checked."""
        with self._lock:
            return bool(self._list(folder))

    def _list(self, folder: Path) -> dict[str, FileChecksums]:
        if _trusted:
            return {}
        if folder not in self._lists:
            self._lists[folder] = read_checksums(folder) or {}
        return self._lists[folder]


class ListedFile:
    """A file in a list, and which of its blocks were checked; thread-safe."""

    def __init__(
        self,
        path: Path,
        checksums: FileChecksums,
        list_name: str = CHECKSUMS,
        hint: str = "",
        mapped: memoryview | None = None,
    ) -> None:
        """``list_name`` and ``hint`` are for messages; ``mapped`` is the content, to be used in place of reading."""
        self.path = path
        self.checksums = checksums
        self._mapped = mapped
        self._list_name, self._hint = list_name, hint or HINT
        self._unchecked = bytearray(b"\1" * -(-checksums.size // checksums.block_bytes))

    def check(self, start: int, stop: int, tensor: str = "") -> None:
        """Read and check the blocks with bytes ``start`` to ``stop``; DataError if one differs."""
        size = self.checksums.block_bytes
        first, end = start // size, -(-stop // size)
        if self._unchecked.find(1, first, end) < 0:
            return
        numbers = [number for number in range(first, min(end, len(self._unchecked))) if self._unchecked[number]]

        def check(number: int) -> None:
            if self._mapped is None:
                self._compare(number, hash_block(self.path, number, size), tensor)
            else:
                self.compare(number, self._mapped[number * size : (number + 1) * size])

        with _read_errors(self.path):
            if len(numbers) < _MANY_BLOCKS:
                for number in numbers:
                    check(number)
            else:
                with ThreadPoolExecutor(THREADS) as pool:
                    list(pool.map(check, numbers))

    def check_read(self, start: int, content: memoryview, tensor: str = "") -> None:
        """As ``check`` for ``content``, which was read at ``start``: whole blocks in it are not read again."""
        size, stop = self.checksums.block_bytes, start + len(content)
        first, end = -(-start // size), stop // size
        if first < end:
            self.compare(first, content[first * size - start : end * size - start], tensor)
        self.check(start, stop, tensor)

    def compare(self, first: int, content: memoryview, tensor: str = "") -> None:
        """Check ``content``, the blocks from number ``first``; DataError if one differs."""
        size = self.checksums.block_bytes
        for at in range(0, len(content), size):
            self._compare(first + at // size, xxhash.xxh3_64_digest(content[at : at + size]), tensor)

    def _compare(self, number: int, digest: bytes, tensor: str) -> None:
        listed = self.checksums
        if digest != listed.hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]:
            start = number * listed.block_bytes
            stop = min(listed.size, start + listed.block_bytes)
            part = f", in {tensor}," if tensor else ""
            raise DataError(
                f"{self.path} is damaged: bytes {start} to {stop}{part} do not match {self._list_name}. {self._hint}"
            )
        self._unchecked[number] = 0


def _check_size(path: Path, listed: FileChecksums, size: int | None) -> None:
    if size != listed.size:
        problem = "is missing" if size is None else f"has {size} bytes"
        raise DataError(f"{path} {problem}; checksums.json lists it with {listed.size} bytes. {HINT}")


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise IOFailure(f"{path} cannot be read: {error.strerror or error}.") from error


class RecordedFiles:
    """The files that are read within :func:`recording`; thread-safe."""

    def __init__(self) -> None:
        self._read = WrittenBlocks()
        self._files: dict[Path, ListedFile] = {}

    def add(self, path: Path, listed: ListedFile | None = None) -> ListedFile:
        """Record a file; returns what its reader calls: ``listed``, or without checksums an object that makes them."""
        return self._files.setdefault(path, listed or _UnlistedFile(path, self._read))

    def checksums(self) -> dict[Path, FileChecksums]:
        """Checksums of all files; what was not read, or not in order, is hashed from the files."""
        parts = self._read.parts()
        return {
            path: hash_file(path, known=parts.get(str(path))) if isinstance(file, _UnlistedFile) else file.checksums
            for path, file in self._files.items()
        }


class _UnlistedFile(ListedFile):
    def __init__(self, path: Path, blocks: WrittenBlocks) -> None:
        super().__init__(path, FileChecksums(path.stat().st_size, b""))
        self._read = blocks

    def check(self, start: int, stop: int, tensor: str = "") -> None:
        pass

    def check_read(self, start: int, content: memoryview, tensor: str = "") -> None:
        self._read.add(str(self.path), start, content)

    def compare(self, first: int, content: memoryview, tensor: str = "") -> None:
        pass


_recorder: RecordedFiles | None = None


@contextlib.contextmanager
def recording() -> Iterator[RecordedFiles]:
    """Within the block, the files that are read in this process are recorded with their checksums."""
    global _recorder
    before, _recorder = _recorder, RecordedFiles()
    try:
        yield _recorder
    finally:
        _recorder = before


_trusted = False


def is_trusting() -> bool:
    """Whether checksums are not checked."""
    return _trusted


@contextlib.contextmanager
def trusting(trust: bool = True) -> Iterator[None]:
    """Within the block, no checksums are checked in this process, if ``trust``."""
    global _trusted
    before, _trusted = _trusted, _trusted or trust
    try:
        yield
    finally:
        _trusted = before
