"""What is prepared so far: parts on the disk, each of which a run that was ended need not make again.

``OUT.partial/`` holds ``origin.json``, of what the parts are made, and ``00000.npz``, ``00001.npz`` and so on: the
arrays of some chunks, how many these were, and the report on them. When all parts are there, the files of the pair are
put together beside them, and the manifest, which comes last, says that they are whole.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from isthmus.atomic_write import atomic_file, rename, write_atomic
from isthmus.data.readers.chunks import CHUNK_BYTES
from isthmus.data.store.indexed_dataset import IndexedWriter
from isthmus.data.store.manifest import PARTIAL, indexed_file, write_manifest
from isthmus.data.tokenize.stats import TokenizeStats
from isthmus.data.tokenize.tokenize_records import TokenizedChunk
from isthmus.errors import DataError, NoSpace, disk_errors

PART_TOKENS = 1 << 21
"""Tokens of a part, about; memory holds one."""
PART_S = 10.0
"""Seconds after which a smaller part is written."""
_PUBLISHED = (".mask.bin", ".bin", ".idx", ".json")
"""In the order in which they get their names: a manifest without its pair would be a lie."""


class Journal:
    """The parts of one output."""

    def __init__(self, prefix: Path) -> None:
        """Nothing is touched yet."""
        self.prefix = prefix
        self.folder = Path(f"{prefix}{PARTIAL}")
        self.report = TokenizeStats()
        self.chunks = 0
        """Of the input that are in the parts."""
        self._parts = 0
        self._waiting: list[TokenizedChunk] = []
        self._last_s = time.monotonic()

    def refuse_existing(self) -> None:
        """See that the output is not there.

        Raises:
            NoSpace: a file of it is.
        """
        for suffix in _PUBLISHED:
            if (path := indexed_file(self.prefix, suffix)).exists():
                raise NoSpace(f"{path} exists already. Remove it or name another output.")

    @contextmanager
    def begun(self, origin: dict[str, Any]) -> Iterator[bool]:
        """Take up what an earlier run left, if it was made of the same, else begin anew.

        When the data turns out to be bad, nothing is kept: once it is mended it is other data.

        Yields:
            Whether the pair is whole already and only its names are missing.

        Raises:
            NoSpace: the output exists, or another process is making it.
        """
        with disk_errors(self.folder):
            begun = origin | {"chunk_bytes": CHUNK_BYTES}  # parts are counted in chunks
            same = _read(self.folder / "origin.json") == json.loads(json.dumps(begun))
            whole = same and self._staged(".json").exists()
            if not whole:
                self.refuse_existing()
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise NoSpace(f"{self.folder}: another process is preparing the same output. Wait for it.") from None
            with disk_errors(self.folder):
                if not same:
                    self._clear()
                    write_atomic(self.folder / "origin.json", json.dumps(begun, indent=1))
                else:
                    self._take_up()
            try:
                yield whole
            except DataError:
                shutil.rmtree(self.folder, ignore_errors=True)
                raise

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.name != "lock":
                path.unlink()

    def _take_up(self) -> None:
        """Count the parts that are whole; what comes after the first that is not goes."""
        parts = sorted(self.folder.glob("[0-9]*.npz"))
        for number, path in enumerate(parts):
            part = _read_part(path) if path == self._part(number) else None
            if part is None:
                for rest in parts[number:]:
                    rest.unlink()
                return
            self._parts, self.chunks = number + 1, self.chunks + part.chunks
            self.report.add(part.report)

    def add(self, piece: TokenizedChunk) -> None:
        """Take the next chunk's piece.

        Raises:
            NoSpace, IOFailure: its part cannot be written.
        """
        self._waiting.append(piece)
        self.report.add(piece.report)
        enough = sum(len(waiting.tokens) for waiting in self._waiting) >= PART_TOKENS
        if enough or time.monotonic() - self._last_s > PART_S:
            self.flush()

    def flush(self) -> None:
        """Write what waits as a part."""
        if not self._waiting:
            return
        pieces, report = self._waiting, TokenizeStats()
        for piece in pieces:
            report.add(piece.report)
        arrays = {
            name: np.concatenate([getattr(piece, name) for piece in pieces])
            for name in ("tokens", "lengths", "documents")
        }
        if pieces[0].mask is not None:
            arrays["mask"] = np.concatenate([piece.mask for piece in pieces if piece.mask is not None])
        said = json.dumps({"chunks": len(pieces), "report": report.as_dict()}).encode()
        path = self._part(self._parts)
        save = cast(Any, np.savez)
        with atomic_file(path) as temporary, temporary.open("wb") as file:
            save(file, said=np.frombuffer(said, dtype=np.uint8), **arrays)
        self._parts, self.chunks, self._waiting = self._parts + 1, self.chunks + len(pieces), []
        self._last_s = time.monotonic()

    def put_together(self, dtype: Any, masked: bool, manifest: dict[str, Any]) -> None:
        """Make the files of the pair out of the parts, and write the manifest beside them."""
        with IndexedWriter(self._staged(""), dtype, masked) as writer:
            for number in range(self._parts):
                part = _read_part(self._part(number))
                assert part is not None
                writer.extend(part.piece.tokens, part.piece.lengths, part.piece.mask)
                writer.end_documents(part.piece.documents)
        write_manifest(self._staged(""), manifest | {"pair": writer.close()})

    def publish(self) -> None:
        """Give the files their names and remove the rest."""
        with disk_errors(self.prefix):
            for suffix in _PUBLISHED:
                if self._staged(suffix).exists():
                    rename(self._staged(suffix), indexed_file(self.prefix, suffix))
            shutil.rmtree(self.folder)

    def _part(self, number: int) -> Path:
        return self.folder / f"{number:05d}.npz"

    def _staged(self, suffix: str) -> Path:
        return indexed_file(self.folder / "pair", suffix)


@dataclass(frozen=True, slots=True)
class _Part:
    chunks: int
    piece: TokenizedChunk

    @property
    def report(self) -> TokenizeStats:
        return self.piece.report


def _read_part(path: Path) -> _Part | None:
    """A part, None when it is cut short or damaged."""
    try:
        with np.load(path) as stored:
            said = json.loads(stored["said"].tobytes())
            mask = stored["mask"] if "mask" in stored else None
            report = TokenizeStats.from_dict(said["report"])
            return _Part(
                said["chunks"], TokenizedChunk(stored["tokens"], mask, stored["lengths"], stored["documents"], report)
            )
    except (OSError, ValueError, LookupError, TypeError, zipfile.BadZipFile):
        return None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
