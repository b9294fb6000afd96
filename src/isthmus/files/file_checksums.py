"""Checksums of files in blocks, made while the files are written.

A folder has a ``checksums.json`` with the size and the XXH3 hash of each block of its own files; subfolders have their
own, so that each folder can be moved by itself. It detects accidents, not forgeries. To write a folder::

    written = WrittenBlocks()                       # one per process
    with written.wrap(path.open("wb"), "model.pt") as file:
        torch.save(state, file)                     # or, for writes at any offset: written.add(name, offset, content)
    write_checksums(folder, [written.parts()])      # one process, with the parts of all, before the folder is renamed

``write_checksums`` hashes what no process has seen whole from the files, so small files need nothing else. Readers are
in ``isthmus.files.checked_files``.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash

from isthmus.errors import DataError, IOFailure, UnsafeInput, disk_errors
from isthmus.files.atomic_write import TEMPORARY, write_atomic
from isthmus.files.input_files import parse_json, read_bytes

CHECKSUMS = "checksums.json"
BLOCK_BYTES = 1 << 20
_ALGORITHM = "xxh3_64"
HASH_BYTES = 8
_MAX_LIST_BYTES = 256 << 20  # lists files of 16 TiB
THREADS = min(4, os.cpu_count() or 1)
_NAME = re.compile(r"[^/\\\0]+")

Blocks = dict[int, tuple[int, bytes] | None]
"""Blocks by number: the length and hash, or None if it must be hashed from the file."""
Parts = dict[str, Blocks]
"""Blocks by file (path relative to the folder, with ``/``)."""


@dataclass(frozen=True, slots=True)
class FileChecksums:
    """Size and hashes of one file."""

    size: int
    hashes: bytes | memoryview
    """8 bytes per block; the last block may be shorter."""
    block_bytes: int = BLOCK_BYTES

    @property
    def digest(self) -> str:
        """A hash of the content: XXH3 of the hashes of the blocks."""
        return xxhash.xxh3_64_hexdigest(self.hashes)

    def as_json(self) -> dict[str, Any]:
        return {"bytes": self.size, "block_bytes": self.block_bytes, "blocks": self.hashes.hex()}

    @classmethod
    def from_json(cls, entry: Any) -> FileChecksums:
        """The reverse of ``as_json``; a ValueError if it is not such an entry."""
        if not isinstance(entry, dict) or entry.keys() != {"bytes", "block_bytes", "blocks"}:
            raise ValueError("an entry without bytes, block_bytes and blocks")
        size, block_bytes, blocks = entry["bytes"], entry["block_bytes"], entry["blocks"]
        if type(size) is not int or type(block_bytes) is not int or not isinstance(blocks, str):
            raise ValueError("an entry with values of another type")
        if size < 0 or not 1 << 12 <= block_bytes <= 1 << 26:
            raise ValueError("an entry with a size out of range")
        if len(blocks) != 2 * HASH_BYTES * -(-size // block_bytes):
            raise ValueError("an entry whose number of blocks does not match its size")
        return cls(size, bytes.fromhex(blocks), block_bytes)


class WrittenBlocks:
    """Hashes of blocks of files, made from the buffers that are written; thread-safe.

    Buffers may come in any order and from several threads. A block is hashed while its content comes in order, at once
    or in pieces; :func:`write_checksums` hashes the others from the file.
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._parts: Parts = defaultdict(dict)
        self._states: dict[tuple[str, int], tuple[int, xxhash.xxh3_64]] = {}
        self._lock = threading.Lock()

    def add(self, name: str, offset: int, content: bytes | memoryview) -> None:
        """Record that ``content`` is written at ``offset`` of a file (path relative to the folder, with ``/``)."""
        view, done = memoryview(content).cast("B"), 0
        while done < len(view):
            number, at = divmod(offset + done, self._block_bytes)
            piece = view[done : done + self._block_bytes - at]
            done += len(piece)
            full_block = (len(piece), xxhash.xxh3_64_digest(piece)) if len(piece) == self._block_bytes else None
            with self._lock:
                if full_block is not None:
                    self._parts[name][number] = full_block
                    self._states.pop((name, number), None)
                else:
                    self._add_piece(name, number, at, piece)

    def forget(self, name: str, start: int, stop: int) -> None:
        """Bytes ``start`` to ``stop`` are written in another way: their blocks must be hashed from the file."""
        with self._lock:
            for number in range(start // self._block_bytes, -(-stop // self._block_bytes)):
                self._parts[name][number] = None
                self._states.pop((name, number), None)

    def wrap(self, file: BinaryIO, name: str) -> BinaryIO:
        """A file object that hashes what is written through it, to an empty file."""
        return cast(BinaryIO, _HashedFile(file, name, self))

    def parts(self) -> Parts:
        """The hashes so far, also those of begun blocks; can be pickled for the process that writes the list."""
        with self._lock:
            parts = {name: dict(blocks) for name, blocks in self._parts.items()}
            for (name, number), (length, state) in self._states.items():
                parts.setdefault(name, {})[number] = length, state.digest()
        return parts

    def _add_piece(self, name: str, number: int, at: int, piece: memoryview) -> None:
        blocks, key = self._parts[name], (name, number)
        length, state = self._states.pop(key, (0, xxhash.xxh3_64()))
        if number in blocks or at != length:  # written before, or not in order
            blocks[number] = None
            return
        state.update(piece)
        self._states[key] = length + len(piece), state
        if length + len(piece) == self._block_bytes:
            blocks[number] = self._block_bytes, state.digest()
            del self._states[key]


class _HashedFile:
    """A writable binary file, with all methods of ``file``."""

    def __init__(self, file: BinaryIO, name: str, blocks: WrittenBlocks) -> None:
        self._file, self._name, self._blocks = file, name, blocks
        self._at = 0

    def write(self, content: bytes | memoryview) -> int:
        done = self._file.write(content)
        self._blocks.add(self._name, self._at, memoryview(content).cast("B")[:done])
        self._at += done
        return done

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = self._file.seek(offset, whence)
        return self._at

    def __enter__(self) -> _HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def write_checksums(
    folder: Path,
    parts: Iterable[Parts] = (),
    *,
    about: Mapping[str, Any] | None = None,
    listed: Mapping[str, FileChecksums] | None = None,
) -> None:
    """Write ``checksums.json`` into ``folder`` and each folder below it, for all files in them but model cards.

    Args:
        folder: complete, and not yet published.
        parts: of all processes that wrote into it; the other blocks are hashed from the files, in threads.
        about: further JSON content of the list of ``folder``, which the checksum of the list covers.
        listed: checksums of files of ``folder`` that are known, also of files that are stored elsewhere.

    Raises:
        NoSpace, IOFailure: the list cannot be written, or a file cannot be read.
    """
    known = merge_parts(parts)
    with disk_errors(folder), ThreadPoolExecutor(THREADS) as pool:
        for root, _, names in os.walk(folder):
            here = Path(root)
            complete = dict(listed or {}) if here == folder else {}
            for name in sorted(names):
                if name != CHECKSUMS and not name.startswith(TEMPORARY) and not name.endswith(".md"):
                    path = here / name
                    if name not in complete or complete[name].size != path.stat().st_size:
                        blocks = known.get(path.relative_to(folder).as_posix(), {})
                        complete[name] = _complete(path, blocks, pool)
            if complete:
                entries = {name: complete[name].as_json() for name in sorted(complete)}
                _write_list(here / CHECKSUMS, entries, about if here == folder else None)


def merge_parts(parts: Iterable[Parts]) -> Parts:
    """The parts of several processes as one."""
    merged: Parts = {}
    for part in parts:
        for name, blocks in part.items():
            known = merged.setdefault(name, {})
            for number, block in blocks.items():
                same = known.setdefault(number, block) == block
                known[number] = block if same else None  # two processes wrote into it
    return merged


def checksums_of_stream(blocks: Blocks) -> FileChecksums:
    """The checksums of a file of which one process has written all bytes in order.

    Raises:
        IOFailure: it was written in another way.
    """
    size = sum(block[0] for block in blocks.values() if block is not None)
    hashes = [_known(blocks, number, size, BLOCK_BYTES) for number in range(-(-size // BLOCK_BYTES))]
    if len(hashes) != len(blocks) or None in hashes:
        raise IOFailure("a file was not written from its start to its end, so it has no checksums.")
    return FileChecksums(size, b"".join(filter(None, hashes)))


def hash_share(folder: Path, known: Parts, rank: int, world_size: int) -> Parts:
    """Hash the share of a rank of the blocks that are not ``known``, of the files in ``known``.

    Args:
        folder: complete, and visible to all ranks.
        known: merged parts of all ranks.
        rank, world_size: of the processes that call it.
    """
    hashes: Parts = {}
    for name, blocks in known.items():
        size = (folder / name).stat().st_size
        missing = [number for number in range(-(-size // BLOCK_BYTES)) if not _known(blocks, number, size, BLOCK_BYTES)]
        hashes[name] = {
            number: (_block_length(number, size, BLOCK_BYTES), hash_block(folder / name, number, BLOCK_BYTES))
            for number in missing[rank::world_size]
        }
    return hashes


def hash_file(path: Path, block_bytes: int = BLOCK_BYTES, known: Blocks | None = None) -> FileChecksums:
    """Hash the blocks of a file that are not ``known``, in threads."""
    with ThreadPoolExecutor(THREADS) as pool:
        return _complete(path, known or {}, pool, block_bytes)


def _complete(path: Path, known: Blocks, pool: ThreadPoolExecutor, block_bytes: int = BLOCK_BYTES) -> FileChecksums:
    """Hash the blocks of a file that are not ``known``."""
    size = path.stat().st_size

    def of(number: int) -> bytes:
        return _known(known, number, size, block_bytes) or hash_block(path, number, block_bytes)

    return FileChecksums(size, b"".join(pool.map(of, range(-(-size // block_bytes)))), block_bytes)


def _known(blocks: Blocks, number: int, size: int, block_bytes: int) -> bytes | None:
    """The known hash of a block, if it has the length of the block in the complete file."""
    length, digest = blocks.get(number) or (0, b"")
    return digest if length == _block_length(number, size, block_bytes) else None


def _block_length(number: int, size: int, block_bytes: int) -> int:
    return min(block_bytes, size - number * block_bytes)


def hash_block(path: Path, number: int, block_bytes: int) -> bytes:
    """Hash one block of a file; a buffer of this thread bounds the memory."""
    if len(getattr(_thread, "buffer", b"")) < block_bytes:
        _thread.buffer = bytearray(block_bytes)
    view, done = memoryview(_thread.buffer)[:block_bytes], 0
    with path.open("rb", buffering=0) as file:
        while done < block_bytes and (got := os.preadv(file.fileno(), [view[done:]], number * block_bytes + done)):
            done += got
    return xxhash.xxh3_64_digest(view[:done])


_thread = threading.local()


def _write_list(path: Path, files: Mapping[str, Any], about: Mapping[str, Any] | None) -> None:
    content = {"algorithm": _ALGORITHM, "files": files, **({"about": about} if about else {})}
    write_atomic(path, json.dumps({**content, "checksum": content_checksum(content)}, indent=1) + "\n")


def content_checksum(content: Mapping[str, Any]) -> str:
    """The checksum of JSON content, which a file may have beside the content; spaces and the order have no effect."""
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def read_checksums(folder: Path) -> dict[str, FileChecksums] | None:
    """The list of a folder, by name of the file; None without one.

    Raises:
        DataError: the list is damaged, or not of Isthmus.
        UnsafeInput: it names a file that is not directly in the folder.
    """
    path = folder / CHECKSUMS
    try:
        content = parse_json(read_bytes(path, _MAX_LIST_BYTES))
        expected = content.pop("checksum")
        if content["algorithm"] != _ALGORITHM:
            raise ValueError(f"algorithm {content['algorithm']!r}, expected {_ALGORITHM}")
        if content_checksum(content) != expected:
            raise ValueError("its own checksum does not match")
        for name in content["files"]:
            if _NAME.fullmatch(name) is None or name in (".", ".."):
                raise UnsafeInput(f"{path} lists {name!r}, which is not a file of this folder. Do not use it.")
        return {name: FileChecksums.from_json(entry) for name, entry in content["files"].items()}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IOFailure(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{path} is damaged, or not a list of checksums of Isthmus ({reason}). {HINT}") from None


HINT = (
    "Copy or make the files again. If they are right, and you changed them on purpose, delete checksums.json or "
    "give --trust."
)
