"""Megatron's indexed format: tokens in ``PREFIX.bin``, starts of sequences and documents in ``PREFIX.idx``.

The ``.idx`` is, little-endian and without gaps (megatron.core.datasets.indexed_dataset, version 1)::

    9 bytes  MMIDIDX 00 00            n x int32  tokens in each sequence
    uint64   version, 1               n x int64  byte of the .bin where each sequence begins
    uint8    code of the token dtype  d x int64  first sequence of each document, then n
    uint64   n, sequences
    uint64   d, documents + 1

Isthmus adds files, which Megatron ignores: ``PREFIX.mask.bin`` has one byte per token, 1 where the token has loss;
``PREFIX.values.bin`` has a float32 per sequence, the label of an answer or the margin of a pair;
``PREFIX.columns.jsonl`` has a line per sequence, an object with the other fields of a prompt's record; ``PREFIX.json``
is the manifest with the sizes and hashes of the others.
"""

from __future__ import annotations

import contextlib
import os
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from isthmus.data.store.manifest import (
    BLOCK_BYTES,
    COLUMNS,
    HINT,
    MASK,
    SUFFIXES,
    VALUES,
    check_sizes,
    dataset_record,
    file_hash,
    file_record,
    indexed_file,
    listed_file,
    read_manifest,
)
from isthmus.data.store.manifest import write_manifest as write_manifest
from isthmus.errors import DataError, IOFailure, MissingInput, disk_errors
from isthmus.files.checked_files import ListedFile, is_trusting
from isthmus.files.file_checksums import WrittenBlocks

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]
MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
_FLOAT_CODES = {6: "float64", 7: "float32"}
_CHUNK = 1 << 24
_WRITTEN_AT_ONCE = 1 << 20  # sequences
_NEWLINE = ord("\n")


@dataclass(frozen=True, slots=True)
class IndexedDataset:
    """Validated, memory-mapped indexed files."""

    prefix: Path
    tokens: npt.NDArray[Any]
    """[total], in the dtype of the file."""
    mask: npt.NDArray[np.uint8] | None
    """[total], 1 where the token has loss; None: all tokens."""
    starts: npt.NDArray[np.int64]
    """[n], the first token of each sequence."""
    lengths: npt.NDArray[np.int64]
    """[n], tokens of each sequence."""
    documents: npt.NDArray[np.int64]
    """[documents + 1]; document k is the sequences ``documents[k]:documents[k + 1]``."""
    manifest: dict[str, Any] | None
    """``PREFIX.json``, if it exists."""
    values: npt.NDArray[np.float32] | None = None
    """[n], the label of an answer, or on both answers the margin of a pair."""
    columns: npt.NDArray[np.uint8] | None = None
    """Bytes of the lines of columns, one for each sequence."""
    checksums: tuple[tuple[ListedFile, int], ...] = ()
    """Checksums of the files of tokens and mask, with bytes per token; readers check the tokens that they read."""


def open_indexed(prefix: Path | str, *, manifest: Path | str | None = None, verify: bool = False) -> IndexedDataset:
    """Check indexed files and map them into memory, read-only.

    Checks the .idx against the .bin; with a manifest also all sizes, and the hashes of the .idx and the values.

    Args:
        prefix: of the files, without ``.bin`` or ``.idx``.
        manifest: its path, if not ``PREFIX.json``.
        verify: also compare the hashes of .bin and mask, which reads them as a whole; needs a manifest.

    Raises:
        MissingInput: the .bin, the .idx or a mask of the manifest does not exist.
        DataError: a file is damaged, truncated, or of another format.
        IOFailure: reading failed.
    """
    data, index, masked, valued, with_columns = (indexed_file(prefix, suffix) for suffix in SUFFIXES)
    manifest_path = Path(manifest) if manifest is not None else indexed_file(prefix, ".json")
    try:
        for path in (data, index):
            if not path.is_file():
                raise MissingInput(f"{path}: no such file. Prepared data is PREFIX.bin and PREFIX.idx together.")
        record = read_manifest(manifest_path) if manifest_path.is_file() else None
        present = [path.is_file() for path in (masked, valued, with_columns)]
        if record is not None:
            check_sizes(prefix, record, manifest_path)
            present = [suffix in record["pair"]["files"] for suffix in (MASK, VALUES, COLUMNS)]
        elif verify:
            raise MissingInput(f"{manifest_path}: no such manifest, so {data} cannot be verified.")
        dtype, lengths, documents = _read_index(index, data.stat().st_size)
        if record is not None:
            checked_suffixes = (".idx", *([VALUES] if present[1] else ()), *([COLUMNS] if present[2] else ()))
            for suffix in () if is_trusting() else record["pair"]["files"] if verify else checked_suffixes:
                path, expected = indexed_file(prefix, suffix), record["pair"]["files"][suffix]["xxh3_128"]
                if (got := file_hash(path)) != expected:
                    raise DataError(f"{path}: its hash is {got}, the manifest has {expected}. {HINT}")
        tokens = map_file(data, dtype)
        mask = map_file(masked, np.dtype(np.uint8)) if present[0] else None
        values = map_file(valued, np.dtype("<f4")) if present[1] else None
        columns = map_file(with_columns, np.dtype(np.uint8)) if present[2] else None
    except OSError as error:
        raise IOFailure(f"{prefix}: cannot be read: {error.strerror or error}.") from error
    if mask is not None and len(mask) != len(tokens):
        raise DataError(f"{masked}: {len(mask)} bytes, expected {len(tokens)}, one per token of {data}. {HINT}")
    if values is not None and len(values) != len(lengths):
        raise DataError(f"{valued}: {len(values)} values, expected {len(lengths)}, one per sequence of {index}. {HINT}")
    if columns is not None and np.count_nonzero(columns == _NEWLINE) != len(lengths):
        raise DataError(f"{with_columns}: expected {len(lengths)} lines, one per sequence of {index}. {HINT}")
    mapped = {".bin": tokens} if mask is None else {".bin": tokens, MASK: mask}
    checksums = tuple(
        (listed, array.itemsize)
        for suffix, array in mapped.items()
        if record is not None and (listed := listed_file(prefix, suffix, record, array)) is not None
    )
    starts = np.cumsum(lengths) - lengths
    return IndexedDataset(Path(prefix), tokens, mask, starts, lengths, documents, record, values, columns, checksums)


def _read_index(path: Path, bin_bytes: int) -> tuple[np.dtype[Any], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(dtype, sequence lengths, document bounds) of a valid .idx."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(HEADER.size)
    if not start.startswith(MAGIC):
        raise DataError(f"{path}: begins with {start[:9]!r}, expected {MAGIC!r}, so it is not a Megatron index.")
    if len(start) < HEADER.size:
        raise DataError(f"{path}: {size} bytes, expected at least {HEADER.size}. {HINT}")
    _, version, code, sequences, bounds = HEADER.unpack(start)
    if version != VERSION:
        raise DataError(f"{path}: version {version}, expected {VERSION}. {HINT}")
    names = {number: name for name, number in DTYPE_CODES.items()}
    if code not in names:
        kind = _FLOAT_CODES.get(code, f"unknown code {code}")
        raise DataError(f"{path}: its values are {kind}; tokens must be one of {', '.join(DTYPE_CODES)}.")
    expected = HEADER.size + sequences * 12 + bounds * 8
    if size == expected + sequences and sequences:
        raise DataError(f"{path}: it has sequence modes, as multimodal data has. Expected text.")
    if size != expected or not bounds:
        raise DataError(
            f"{path}: {size} bytes, expected {expected} for {sequences} sequences and {bounds} document bounds. {HINT}"
        )
    raw = map_file(path, np.dtype(np.uint8))
    lengths = np.frombuffer(raw, "<i4", sequences, HEADER.size).astype(np.int64)
    pointers = np.frombuffer(raw, "<i8", sequences, HEADER.size + sequences * 4)
    documents = np.frombuffer(raw, "<i8", bounds, HEADER.size + sequences * 12).astype(np.int64)
    dtype = np.dtype(names[code]).newbyteorder("<")
    if sequences and int(lengths.min()) < 0:
        raise DataError(f"{path}: sequence {int(lengths.argmin())} has a length below zero. {HINT}")
    ends = np.cumsum(lengths) * dtype.itemsize
    if not np.array_equal(pointers, ends - lengths * dtype.itemsize):
        raise DataError(f"{path}: its pointers do not match its sequence lengths. {HINT}")
    total = int(ends[-1]) if sequences else 0
    if total != bin_bytes:
        raise DataError(f"{path.with_suffix('.bin')}: {bin_bytes} bytes, but its .idx describes {total}. {HINT}")
    if documents[0] != 0 or documents[-1] != sequences or bool(np.any(np.diff(documents) < 0)):
        raise DataError(f"{path}: document bounds do not ascend from 0 to {sequences}. {HINT}")
    return dtype, lengths, documents


def scan_indexed(pair: IndexedDataset) -> dict[str, Any]:
    """The record of ``IndexedWriter.close`` for files without a manifest; reads them once."""
    largest = -1
    for at in range(0, len(pair.tokens), _CHUNK):
        part = pair.tokens[at : at + _CHUNK]
        largest = max(largest, int(part.max()))
        if int(part.min()) < 0:
            raise DataError(f"{pair.prefix}.bin: the token id {int(part.min())} is below zero. {HINT}")
    optional = {MASK: pair.mask, VALUES: pair.values, COLUMNS: pair.columns}
    suffixes = [suffix for suffix in SUFFIXES if suffix not in optional or optional[suffix] is not None]
    return dataset_record(
        pair.tokens.dtype,
        sequences=len(pair.lengths),
        documents=len(pair.documents) - 1,
        tokens=len(pair.tokens),
        max_token_id=largest,
        files={suffix: file_record(indexed_file(pair.prefix, suffix)) for suffix in suffixes},
    )


def map_file(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    length = path.stat().st_size // dtype.itemsize
    return np.memmap(path, dtype=dtype, mode="r", shape=(length,)) if length else np.empty(0, dtype=dtype)


def find_prefix(name: Path | str) -> Path | None:
    """The prefix of the indexed files that ``name`` (PREFIX, PREFIX.bin or PREFIX.idx) names, if any.

    Both files win over a folder PREFIX, in which Megatron-LM caches sample indices; ``PREFIX/`` is the folder.
    """
    text = str(name)
    if os.path.isdir(text) and all(indexed_file(text, suffix).is_file() for suffix in (".bin", ".idx")):
        return Path(text)
    if Path(text).exists() and not text.endswith((".bin", ".idx")):
        return None
    for prefix in (*(text.removesuffix(suffix) for suffix in (MASK, VALUES, COLUMNS, ".bin", ".idx")), text):
        if indexed_file(prefix, ".idx").is_file() or indexed_file(prefix, ".bin").is_file():
            return Path(prefix)
    return None


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Megatron's dtype for a vocabulary of this size."""
    return np.uint16 if vocab_size < 65500 else np.int32


class IndexedWriter:
    """Writes indexed files as a stream; memory contains 12 bytes per sequence and document.

    The context manager closes the files, or removes them when the block raises. The caller writes to a temporary name
    and renames the files that ``close`` has synced.
    """

    def __init__(
        self,
        prefix: Path | str,
        dtype: npt.DTypeLike,
        masked: bool = False,
        valued: bool = False,
        with_columns: bool = False,
    ) -> None:
        """Create or replace the files; ``dtype`` is one of ``DTYPE_CODES``."""
        self.prefix: Path = Path(prefix)
        self.dtype: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")
        self._code = DTYPE_CODES[self.dtype.name]
        self._lengths, self._bounds = array("i"), array("q", [0])
        self._tokens, self._largest = 0, -1
        enabled = {MASK: masked, VALUES: valued, COLUMNS: with_columns}
        self._blocks, self._written = WrittenBlocks(BLOCK_BYTES), dict.fromkeys(SUFFIXES, 0)
        self._hashes = {suffix: xxhash.xxh3_128() for suffix in SUFFIXES if enabled.get(suffix, True)}
        self._files: dict[str, BinaryIO] = {}
        self._closed: dict[str, Any] | None = None
        with disk_errors(self.prefix):
            indexed_file(self.prefix, ".json").unlink(missing_ok=True)
            for suffix in self._hashes:
                self._files[suffix] = indexed_file(self.prefix, suffix).open("wb", buffering=1 << 20)

    def add(self, tokens: Tokens, mask: Tokens | None = None) -> None:
        """Append one sequence."""
        self.extend(tokens, (len(tokens),), mask)

    def extend(
        self,
        tokens: Tokens,
        lengths: Tokens,
        mask: Tokens | None = None,
        values: npt.NDArray[np.float32] | None = None,
        columns: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """Append sequences, concatenated in ``tokens`` [total] and ``mask`` [total], to the open document.

        ``values`` [n] of the sequences are written to files with values; the default is zeros. ``columns`` are the
        bytes of a line for each sequence. DataError if a token id is not in the dtype, a sequence has 2**31 tokens or
        more, or lengths disagree.
        """
        ids, sizes = np.asarray(tokens), np.asarray(lengths, dtype=np.int64)
        limits = np.iinfo(self.dtype)
        if len(ids):
            low, high = int(ids.min()), int(ids.max())
            if low < max(limits.min, 0) or high > limits.max:
                raise DataError(
                    f"{self.prefix}: token ids go from {low} to {high}; {self.dtype.name} cannot hold them."
                )
            self._largest = max(self._largest, high)
        if int(sizes.sum()) != len(ids) or (len(sizes) and not 0 <= int(sizes.min()) <= int(sizes.max()) < 1 << 31):
            raise DataError(f"{self.prefix}: lengths of {int(sizes.sum())} tokens in all for {len(ids)} tokens.")
        if (mask is not None) != (MASK in self._hashes) or (mask is not None and len(mask) != len(ids)):
            raise DataError(
                f"{self.prefix}: expected a mask entry for each token of files with a mask, and no mask without."
            )
        self._lengths.frombytes(sizes.astype(np.int32).tobytes())
        self._tokens += len(ids)
        self._write(".bin", ids.astype(self.dtype))
        if mask is not None:
            self._write(MASK, np.asarray(mask).astype(np.uint8))
        if VALUES in self._hashes:
            self._write(VALUES, np.zeros(len(sizes), "<f4") if values is None else values.astype("<f4"))
        if columns is not None:
            self._write(COLUMNS, columns)

    def end_document(self) -> None:
        self._bounds.append(len(self._lengths))

    def end_documents(self, counts: Tokens) -> None:
        """End documents of ``counts`` [d] sequences each, which are all since the last end."""
        bounds = self._bounds[-1] + np.cumsum(np.asarray(counts, dtype=np.int64))
        if len(bounds) and int(bounds[-1]) != len(self._lengths):
            raise DataError(f"{self.prefix}: documents end at sequence {int(bounds[-1])} of {len(self._lengths)}.")
        self._bounds.frombytes(bounds.tobytes())

    def close(self) -> dict[str, Any]:
        """Write the .idx, sync all files, and return the record for ``pair`` in the manifest; ends an open document."""
        if self._closed is not None:
            return self._closed
        if self._bounds[-1] != len(self._lengths):
            self.end_document()
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        start = HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._bounds))
        self._write(".idx", np.frombuffer(start, dtype=np.uint8))
        self._write(".idx", lengths)
        at = 0
        for first in range(0, len(lengths), _WRITTEN_AT_ONCE):
            ends = at + np.cumsum(lengths[first : first + _WRITTEN_AT_ONCE], dtype=np.int64) * self.dtype.itemsize
            self._write(".idx", np.concatenate([np.array([at], dtype=np.int64), ends[:-1]]))
            at = int(ends[-1])
        self._write(".idx", np.frombuffer(self._bounds, dtype=np.int64))
        with disk_errors(self.prefix):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
                file.close()
            blocks = self._blocks.parts()
            files = {
                suffix: file_record(indexed_file(self.prefix, suffix), state.hexdigest(), blocks.get(suffix))
                for suffix, state in self._hashes.items()
            }
        self._closed = dataset_record(
            self.dtype,
            sequences=len(lengths),
            documents=len(self._bounds) - 1,
            tokens=self._tokens,
            max_token_id=self._largest,
            files=files,
        )
        return self._closed

    def discard(self) -> None:
        """Close and remove the files."""
        for suffix, file in self._files.items():
            with contextlib.suppress(OSError):  # flushing may fail again on a full disk
                file.close()
            indexed_file(self.prefix, suffix).unlink(missing_ok=True)

    def _write(self, suffix: str, values: npt.NDArray[Any]) -> None:
        data = np.ascontiguousarray(values).view(np.uint8).data
        self._hashes[suffix].update(data)
        self._blocks.add(suffix, self._written[suffix], data)
        self._written[suffix] += len(data)
        with disk_errors(self.prefix):
            self._files[suffix].write(data)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()
        else:
            self.close()
