"""A checkpoint that all ranks read: one rank of each machine reads index and checksums, and the others map them."""

from __future__ import annotations

import io
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from isthmus.engine.checkpoint.checkpoint_checks import alternative, check_folder, check_sizes, check_stored_sizes
from isthmus.engine.checkpoint.checkpoint_index import CheckpointIndex, Place
from isthmus.engine.checkpoint.checkpoint_store import StoredData, stored_data
from isthmus.engine.checkpoint.index_file import INDEX, read_index
from isthmus.engine.parallel.process_groups import agree, gather_objects
from isthmus.errors import DataError
from isthmus.files.checked_files import ChecksumVerifier
from isthmus.files.file_checksums import CHECKSUMS
from isthmus.platforms import rank_env

_THREADS = 4


@dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    folder: Path
    index: CheckpointIndex
    verifier: ChecksumVerifier
    data: StoredData | None = None
    """Where the data files are; None if they are in ``folder``."""

    def check(self, places: Iterable[tuple[Place, str]]) -> None:
        """Check the files that have these places, each with the name of its tensor, and the blocks, in threads.

        Blocks in a store are checked when they are read.

        Raises:
            DataError: a file is missing or truncated, or a block is damaged; names file and tensor.
        """
        reads = [((self.index.files[file], offset, offset + length), name) for (file, offset, length), name in places]
        ends: dict[str, int] = {}
        for (file_name, _, end), _ in reads:
            ends[file_name] = max(end, ends.get(file_name, 0))
        if self.data is not None:
            check_stored_sizes(self.data, ends)
            return
        check_sizes(self.folder, ends)
        if not self.verifier.has_list(self.folder):
            return

        def check(read: tuple[tuple[str, int, int], str]) -> None:
            (file_name, start, end), name = read
            self.verifier.check(self.folder / file_name, start, end, tensor=name)

        with alternative(), ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(check, reads):
                pass

    def open(self, place: Place) -> IO[bytes]:
        """A part of a file, as a file."""
        number, offset, length = place
        name = self.index.files[number]
        if self.data is None:
            return io.BufferedReader(_FilePart(self.folder / name, offset, length))
        return io.BytesIO(self._read_stored(self.data, name, offset, length))

    def _read_stored(self, data: StoredData, name: str, offset: int, length: int) -> bytes:
        """Read the blocks that have these bytes, and check them."""
        listed = self.verifier.listed(self.folder, name)
        if listed is None:
            return data.read(name, offset, offset + length)
        size = listed.checksums.block_bytes
        first, stop = offset // size, min(listed.checksums.size, -(-(offset + length) // size) * size)
        content = data.read(name, first * size, stop)
        with alternative():
            if len(content) != stop - first * size:
                raise DataError(f"{data.address}/{name} has no bytes {first * size} to {stop}.")
            listed.compare(first, memoryview(content))
        return content[offset - first * size :][:length]


class _FilePart(io.RawIOBase):
    """A range of a file, as a file."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._path, self._offset, self._length, self._at = path, offset, length, 0
        self._descriptor = os.open(path, os.O_RDONLY)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], self._offset + self._at + done)
            if not count:
                raise DataError(f"{self._path} ends before byte {self._offset + self._length}.")
            done += count
        self._at += done
        return done

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


@contextmanager
def opened_checkpoint(folder: Path) -> Iterator[OpenedCheckpoint]:
    """Open a checkpoint on all ranks; a collective.

    Rank 0 checks all files, another rank the index and the files that it reads from.

    Raises:
        MissingInput: the folder or its index is missing.
        DataError: a file is missing, truncated or damaged.
        UnsafeInput: the index would run code.
    """
    verifier, indices = ChecksumVerifier(), list[CheckpointIndex]()
    with ExitStack() as stack:
        shared: list[str] = []

        def read() -> None:
            if dist.get_rank() == 0:
                indices.append(check_folder(folder, verifier))
            elif rank_env.local_rank() == 0:
                indices.append(_checked_index(folder, verifier))
            if indices and rank_env.local_world_size() > 1:
                temporary = Path(tempfile.mkdtemp(prefix="isthmus-index-"))
                stack.callback(shutil.rmtree, temporary, ignore_errors=True)
                (temporary / INDEX).write_bytes(indices[0].to_bytes())
                (temporary / CHECKSUMS).write_bytes(verifier.packed_list(folder))
                shared.append(str(temporary))

        agree(read)
        paths = gather_objects(shared)
        rank = dist.get_rank()

        def attach() -> None:
            if indices:
                return
            temporary = Path(*paths[rank - rank_env.local_rank()])
            if (temporary / INDEX).is_file():
                indices.append(CheckpointIndex.from_bytes(_mapped(temporary / INDEX)))
                verifier.use_packed_list(folder, _mapped(temporary / CHECKSUMS))
            else:  # this rank does not have the temporary files of the first one of its machine
                indices.append(_checked_index(folder, verifier))

        agree(attach)
    yield OpenedCheckpoint(folder, indices[0], verifier, stored_data(folder))


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _checked_index(folder: Path, verifier: ChecksumVerifier) -> CheckpointIndex:
    with alternative():
        verifier.check(folder / INDEX)
    return read_index(folder)
