"""The finished parts of an output, from which an interrupted run continues.

``OUT.partial/`` contains ``inputs.json`` (data, tokenizer and options) and ``00000.npz``, ``00001.npz``, ...: the
tokens of some input chunks, the number of these chunks, and their stats. From all parts the indexed files are assembled
in the same folder and renamed, the manifest last.
"""

from __future__ import annotations

import json
import shutil
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isthmus.data.readers.chunks import CHUNK_BYTES
from isthmus.data.readers.data_names import PARTIAL
from isthmus.data.store.indexed_dataset import IndexedWriter
from isthmus.data.store.manifest import COLUMNS, MASK, VALUES, indexed_file, write_manifest
from isthmus.data.tokenize.stats import TokenizeStats
from isthmus.data.tokenize.tokenize_records import TokenizedChunk
from isthmus.errors import DataError, OutputExists, disk_errors
from isthmus.files.atomic_write import atomic_file, rename, write_atomic
from isthmus.files.folder_lock import LOCK, FolderLock

PART_TOKENS = 1 << 21
"""Tokens after which a part is written; memory contains one part."""
PART_S = 10.0
"""Seconds after which a smaller part is written."""
_PUBLISHED = (MASK, VALUES, COLUMNS, ".bin", ".idx", ".json")
"""In the order of renaming: the manifest comes last."""


class PartialOutput:
    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.folder = Path(f"{prefix}{PARTIAL}")
        self.stats = TokenizeStats()
        self.chunks = 0
        """Input chunks in the written parts."""
        self._valued = False
        """Whether a written part has values."""
        self._with_columns = False
        """Whether the parts have columns."""
        self._parts = 0
        self._buffer: list[TokenizedChunk] = []
        self._written_s = time.monotonic()

    def refuse_existing(self) -> None:
        """Raises OutputExists if a file of the output exists."""
        for suffix in _PUBLISHED:
            if (path := indexed_file(self.prefix, suffix)).exists():
                raise OutputExists(f"{path} exists already. Remove it or name another output.")

    @contextmanager
    def opened(self, inputs: dict[str, Any]) -> Iterator[bool]:
        """Load the parts of an earlier run with the same inputs, or remove other parts; locks the folder.

        Yields whether the indexed files are complete and only need renaming. A DataError in the block removes all
        parts.
        """
        content = json.dumps(inputs | {"chunk_bytes": CHUNK_BYTES}, indent=1)  # parts are counted in chunks
        with FolderLock(self.folder / LOCK, self.prefix):
            with disk_errors(self.folder):
                record = self.folder / "inputs.json"
                same = record.is_file() and record.read_bytes() == content.encode()
                assembled = self._staged(".json").exists()
                complete = same and assembled
                if assembled and not same:
                    for suffix in _PUBLISHED:  # the interrupted call has renamed the files that are missing here
                        if not self._staged(suffix).exists():
                            indexed_file(self.prefix, suffix).unlink(missing_ok=True)
                if not complete:
                    try:
                        self.refuse_existing()
                    except OutputExists:
                        # Published by the process that had the lock before, or killed while it removed the parts.
                        if not record.is_file() or indexed_file(self.prefix, ".json").exists():
                            shutil.rmtree(self.folder)
                        raise
                if same:
                    self._load_parts()
                else:
                    for path in self.folder.iterdir():
                        if path.name != LOCK:
                            path.unlink()
                    write_atomic(record, content)
            try:
                yield complete
            except DataError:
                shutil.rmtree(self.folder, ignore_errors=True)
                raise

    def _load_parts(self) -> None:
        """Count the complete parts; remove those after the first missing or damaged one."""
        paths = sorted(self.folder.glob("[0-9]*.npz"))
        for number, path in enumerate(paths):
            part = _read_part(path) if path == self._part(number) else None
            if part is None:
                for rest in paths[number:]:
                    rest.unlink()
                return
            chunks, tokenized = part
            self._parts, self.chunks = number + 1, self.chunks + chunks
            self._valued |= tokenized.values is not None
            self._with_columns |= tokenized.columns is not None
            self.stats.add(tokenized.stats)

    def add(self, chunk: TokenizedChunk) -> None:
        """Append the next chunk; write a part if it is large or old enough."""
        self._buffer.append(chunk)
        self.stats.add(chunk.stats)
        enough = sum(len(buffered.tokens) for buffered in self._buffer) >= PART_TOKENS
        if enough or time.monotonic() - self._written_s > PART_S:
            self.flush()

    def flush(self) -> None:
        """Write the buffered chunks as a part."""
        if not self._buffer:
            return
        chunks, stats = self._buffer, TokenizeStats()
        for chunk in chunks:
            stats.add(chunk.stats)
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(chunk, name) for chunk in chunks])
            for name in ("tokens", "mask", "lengths", "documents", "columns")
            if getattr(chunks[0], name) is not None
        }
        header = json.dumps({"chunks": len(chunks), "stats": stats.as_dict()}).encode()
        if any(chunk.values is not None for chunk in chunks):
            self._valued = True
            zeros = (np.zeros(len(chunk.lengths), np.float32) for chunk in chunks)
            arrays["values"] = np.concatenate(
                [zero if chunk.values is None else chunk.values for chunk, zero in zip(chunks, zeros, strict=True)]
            )
        self._with_columns |= "columns" in arrays
        arrays["header"] = np.frombuffer(header, dtype=np.uint8)
        with atomic_file(self._part(self._parts)) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)
        self._parts, self.chunks, self._buffer = self._parts + 1, self.chunks + len(chunks), []
        self._written_s = time.monotonic()

    def assemble(self, dtype: npt.DTypeLike, masked: bool, manifest: dict[str, Any]) -> None:
        """Write the indexed files and the manifest from the parts."""
        with IndexedWriter(self._staged(""), dtype, masked, self._valued, self._with_columns) as writer:
            for number in range(self._parts):
                part = _read_part(self._part(number))
                assert part is not None
                tokenized = part[1]
                writer.extend(tokenized.tokens, tokenized.lengths, tokenized.mask, tokenized.values, tokenized.columns)
                writer.end_documents(tokenized.documents)
        write_manifest(self._staged(""), manifest | {"pair": writer.close()})

    def publish(self) -> None:
        """Rename the assembled files to their final names and remove the parts."""
        with disk_errors(self.prefix):
            for suffix in _PUBLISHED:
                if self._staged(suffix).exists():
                    rename(self._staged(suffix), indexed_file(self.prefix, suffix))
            shutil.rmtree(self.folder)

    def _part(self, number: int) -> Path:
        return self.folder / f"{number:05d}.npz"

    def _staged(self, suffix: str) -> Path:
        return indexed_file(self.folder / "pair", suffix)


def _read_part(path: Path) -> tuple[int, TokenizedChunk] | None:
    """(number of input chunks, content) of a part; None if damaged."""
    try:
        with np.load(path) as stored:
            header = json.loads(stored["header"].tobytes())
            mask, values, columns = (stored[name] if name in stored else None for name in ("mask", "values", "columns"))
            stats = TokenizeStats.from_dict(header["stats"])
            tokens, lengths, documents = (stored[name] for name in ("tokens", "lengths", "documents"))
            tokenized = TokenizedChunk(tokens, mask, lengths, documents, stats, values, columns)
            return header["chunks"], tokenized
    except (OSError, ValueError, LookupError, TypeError, zipfile.BadZipFile):
        return None
