"""The shards of the input of ``isthmus prepare``, and the finished parts of each.

A shard is a range of the input chunks that one process, or one machine, tokenizes. ``00012-00003.npz`` in
``OUT.partial`` is part 3 of shard 12: the tokens of some of its chunks, their number, and their stats. ``00012.json``
lists the parts of a complete shard with their checksums. The plan depends only on the files, so parts that one engine
has made are used by the others.
"""

from __future__ import annotations

import io
import json
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from isthmus.data.readers.chunks import CHUNK_BYTES, RecordChunk, first_records, kept_records
from isthmus.data.readers.data_names import is_hub_name
from isthmus.data.readers.file_formats import read_chunks
from isthmus.data.tokenize.stats import TokenizeStats
from isthmus.data.tokenize.tokenize_records import TokenizedChunk
from isthmus.files.remote_files import Folder, file_bytes, open_folder

SHARD_BYTES = 1 << 26
"""Input of a shard. Consecutive smaller files are one shard."""
_MOST_SHARDS = 16
"""Most shards of a file: each skips the chunks before it, so the file is read 8 times, 4 % of the time of tokenization.
"""
_SPLIT = (".jsonl", ".ndjson")
"""Suffixes of files that are split: their chunks are cut fast, and are as many as their bytes say."""
PART_TOKENS = 1 << 21
"""Tokens after which a part is written; memory contains one part."""
PART_S = 10.0
"""Seconds after which a smaller part is written."""
_ARRAYS = ("tokens", "mask", "lengths", "documents", "columns")


@dataclass(frozen=True, slots=True)
class InputShard:
    names: tuple[str, ...]
    first: int = 0
    """Its first chunk of the chunks of ``names``."""
    end: int | None = None
    """The chunk after its last; None: all the rest."""
    max_records: int | None = None
    """Only the first records; None: all."""
    dropped: tuple[str, str] | None = None
    """Folder and name of a file, [n, 2]: chunk, and record in it, of each record that is left out."""

    def chunks(self, start: int = 0) -> Iterator[RecordChunk]:
        """The chunks from number ``start`` of the shard on."""
        limited = first_records(read_chunks(self.names), self.max_records)
        chunks, dropped = islice(limited, self.first + start, self.end), self.dropped_records()
        return (kept_records(chunk, dropped.get(k)) for k, chunk in enumerate(chunks, start))

    def dropped_records(self) -> dict[int, frozenset[int]]:
        """Chunk of the shard -> records of it that are left out."""
        if self.dropped is None:
            return {}
        folder, name = self.dropped
        rows = np.load(io.BytesIO(open_folder(folder).read(name) or b""))
        numbers, firsts = np.unique(rows[np.argsort(rows[:, 0], kind="stable"), 0], return_index=True)
        groups = np.split(rows[np.argsort(rows[:, 0], kind="stable"), 1], firsts[1:])
        return {int(k): frozenset(group.tolist()) for k, group in zip(numbers, groups, strict=False)}


def plan_shards(names: Sequence[str], max_records: int | None = None) -> list[InputShard]:
    """Shards of about ``SHARD_BYTES`` in the order of the files; a single one with ``max_records``, which count on."""
    if max_records is not None:
        return [InputShard(tuple(names), max_records=max_records)]
    shards: list[InputShard] = []
    small: list[str] = []
    small_bytes = 0
    for name in names:
        size = SHARD_BYTES if is_hub_name(name) or Path(name).is_dir() else file_bytes(name)
        if small and small_bytes + size > SHARD_BYTES:
            shards.append(InputShard(tuple(small)))
            small, small_bytes = [], 0
        count = min(-(-size // SHARD_BYTES), _MOST_SHARDS) if name.endswith(_SPLIT) else 1
        if count > 1:
            chunks = -(-size // (count * CHUNK_BYTES))
            firsts = [chunks * k for k in range(count)]
            shards += [InputShard((name,), first, end) for first, end in zip(firsts, [*firsts[1:], None], strict=True)]
        else:
            small.append(name)
            small_bytes += size
    return [*shards, InputShard(tuple(small))] if small else shards


class ShardParts:
    """The parts of a shard that are written, and the tokenized chunks that are not."""

    def __init__(self, folder: Folder, number: int, shard: InputShard, inputs: str) -> None:
        """``inputs`` identifies data and settings: parts of others are not used."""
        self.folder = folder
        self.number = number
        self.shard = shard
        self.inputs = inputs
        self.stats: TokenizeStats = TokenizeStats()
        self.chunks: int = 0
        """Input chunks in the written parts."""
        self.complete: bool = False
        self.has_values: bool = False
        """Whether a written part has values."""
        self.has_columns: bool = False
        self._parts: list[dict[str, Any]] = []
        self._buffer: list[TokenizedChunk] = []
        self._written_s = time.monotonic()

    @property
    def _record(self) -> str:
        return f"{self.number:05d}.json"

    def load(self, names: Sequence[str]) -> None:
        """Count the parts of an earlier call among the ``names`` of the folder; remove those from a damaged one on."""
        prefix = f"{self.number:05d}-"
        parts = [name for name in names if name.startswith(prefix) and name.endswith(".npz")]
        if self._record in names and self.load_record():
            return
        for index, name in enumerate(parts):
            content = self.folder.read(name) if name == self._part_name(index) else None
            part = None if content is None else _parse_part(content)
            # A process that was believed dead may have written parts of its own: only a sequence of chunks counts.
            if content is None or part is None or part[0]["place"] != [self.inputs, self.number, self.chunks]:
                for rest in parts[index:]:
                    self.folder.remove(rest)
                return
            header, tokenized = part
            self._append(name, content, header["chunks"], tokenized)
            self.stats.add(tokenized.stats)

    def load_record(self) -> bool:
        """Use the record of the complete shard, if it is there."""
        try:
            record = json.loads(self.folder.read(self._record) or b"")
            stats = TokenizeStats.from_dict(record["stats"])
            if record["inputs"] != self.inputs:
                return False
            self._parts, self.chunks = list(record["parts"]), int(record["chunks"])
            self.has_values, self.has_columns = bool(record["has_values"]), bool(record["has_columns"])
        except (ValueError, LookupError, TypeError):
            return False
        self.stats, self.complete = stats, True
        return True

    def remaining_chunks(self) -> Iterator[RecordChunk]:
        return self.shard.chunks(self.chunks)

    def add(self, chunk: TokenizedChunk) -> None:
        """Append the next chunk; write a part if it is large or old enough."""
        self._buffer.append(chunk)
        self.stats.add(chunk.stats)
        enough = sum(len(buffered.tokens) for buffered in self._buffer) >= PART_TOKENS
        if enough or time.monotonic() - self._written_s > PART_S:
            self._flush()

    def finish(self) -> None:
        """Write the buffered chunks, and the record of the complete shard."""
        self._flush()
        record = {
            "inputs": self.inputs,
            "chunks": self.chunks,
            "has_values": self.has_values,
            "has_columns": self.has_columns,
            "parts": self._parts,
            "stats": self.stats.as_dict(),
        }
        self.folder.write(self._record, json.dumps(record, indent=1).encode())
        self.complete = True

    def _flush(self) -> None:
        if not self._buffer:
            return
        chunks, stats = self._buffer, TokenizeStats()
        for chunk in chunks:
            stats.add(chunk.stats)
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(chunk, name) for chunk in chunks])
            for name in _ARRAYS
            if getattr(chunks[0], name) is not None
        }
        if any(chunk.values is not None for chunk in chunks):
            zeros = (np.zeros(len(chunk.lengths), np.float32) for chunk in chunks)
            arrays["values"] = np.concatenate(
                [zero if chunk.values is None else chunk.values for chunk, zero in zip(chunks, zeros, strict=True)]
            )
        place = [self.inputs, self.number, self.chunks]
        header = {"place": place, "chunks": len(chunks), "stats": stats.as_dict()}
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
        file = io.BytesIO()
        np.savez(file, **arrays)
        content, name = file.getvalue(), self._part_name(len(self._parts))
        self.folder.write(name, content)
        parsed = TokenizedChunk(
            arrays["tokens"], None, arrays["lengths"], arrays["documents"], stats, arrays.get("values"),
            arrays.get("columns"),
        )  # fmt: skip
        self._append(name, content, len(chunks), parsed)
        self._buffer, self._written_s = [], time.monotonic()

    def _append(self, name: str, content: bytes, chunks: int, tokenized: TokenizedChunk) -> None:
        self._parts.append({"name": name, "bytes": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()})
        self.chunks += chunks
        self.has_values |= tokenized.values is not None
        self.has_columns |= tokenized.columns is not None

    def read(self) -> Iterator[TokenizedChunk]:
        """The parts of a complete shard; DamagedParts if one is not what was written."""
        for entry in self._parts:
            content = self.folder.read(entry["name"]) or b""
            part = _parse_part(content) if xxhash.xxh3_128(content).hexdigest() == entry["xxh3_128"] else None
            if part is None:
                self.folder.remove(self._record)
                self.folder.remove(entry["name"])
                raise DamagedParts(self.number)
            yield part[1]

    def _part_name(self, index: int) -> str:
        return f"{self.number:05d}-{index:05d}.npz"


class DamagedParts(Exception):
    """A part of the complete shard ``number`` was damaged, and is removed with the record of the shard."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _parse_part(content: bytes) -> tuple[dict[str, Any], TokenizedChunk] | None:
    """(header, content) of a part; None if damaged."""
    try:
        with np.load(io.BytesIO(content)) as stored:
            header = json.loads(stored["header"].tobytes())
            mask, values, columns = (stored[name] if name in stored else None for name in ("mask", "values", "columns"))
            stats = TokenizeStats.from_dict(header["stats"])
            tokens, lengths, documents = (stored[name] for name in ("tokens", "lengths", "documents"))
            return {name: header[name] for name in ("place", "chunks")}, TokenizedChunk(
                tokens, mask, lengths, documents, stats, values, columns
            )
    except (OSError, ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile):
        return None
