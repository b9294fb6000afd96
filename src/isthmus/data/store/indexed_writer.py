"""Writes Megatron's indexed format, see :mod:`isthmus.data.store.indexed_dataset`."""

from __future__ import annotations

import contextlib
import os
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from isthmus.data.store.manifest import SUFFIXES, dataset_record, indexed_file
from isthmus.errors import DataError, disk_errors

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
_CHUNK = 1 << 20
Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Megatron's dtype for a vocabulary of this size."""
    return np.uint16 if vocab_size < 65500 else np.int32


class IndexedWriter:
    """Writes indexed files as a stream; memory contains 12 bytes per sequence and document.

    The context manager closes the files, or removes them when the block raises. The caller writes to a temporary name
    and renames the files that ``close`` has synced.
    """

    def __init__(self, prefix: Path | str, dtype: npt.DTypeLike, masked: bool = False) -> None:
        """Create or replace the files; ``dtype`` is one of ``DTYPE_CODES``."""
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype).newbyteorder("<")
        self._code = DTYPE_CODES[self.dtype.name]
        self._lengths, self._bounds = array("i"), array("q", [0])
        self._tokens, self._largest = 0, -1
        self._hashes = {suffix: xxhash.xxh3_128() for suffix in SUFFIXES[: 3 if masked else 2]}
        self._files: dict[str, BinaryIO] = {}
        self._closed: dict[str, Any] | None = None
        with disk_errors(self.prefix):
            indexed_file(self.prefix, ".json").unlink(missing_ok=True)
            for suffix in self._hashes:
                self._files[suffix] = indexed_file(self.prefix, suffix).open("wb", buffering=1 << 20)

    def add(self, tokens: Tokens, mask: Tokens | None = None) -> None:
        """Append one sequence."""
        self.extend(tokens, (len(tokens),), mask)

    def extend(self, tokens: Tokens, lengths: Tokens, mask: Tokens | None = None) -> None:
        """Append sequences to the open document.

        Args:
            tokens: [total], the concatenated sequences.
            lengths: [n].
            mask: [total], 1 where the token has loss; only for files with a mask.

        Raises:
            DataError: a token id is not in the dtype, a sequence has 2**31 tokens or more, or lengths disagree.
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
        if (mask is not None) != (".mask.bin" in self._hashes) or (mask is not None and len(mask) != len(ids)):
            raise DataError(
                f"{self.prefix}: expected a mask entry for each token of files with a mask, and no mask without."
            )
        self._lengths.frombytes(sizes.astype(np.int32).tobytes())
        self._tokens += len(ids)
        self._write(".bin", ids.astype(self.dtype))
        if mask is not None:
            self._write(".mask.bin", np.asarray(mask).astype(np.uint8))

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
        for first in range(0, len(lengths), _CHUNK):
            ends = at + np.cumsum(lengths[first : first + _CHUNK], dtype=np.int64) * self.dtype.itemsize
            self._write(".idx", np.concatenate([np.array([at], dtype=np.int64), ends[:-1]]))
            at = int(ends[-1])
        self._write(".idx", np.frombuffer(self._bounds, dtype=np.int64))
        with disk_errors(self.prefix):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
                file.close()
            sizes = {suffix: indexed_file(self.prefix, suffix).stat().st_size for suffix in self._hashes}
        self._closed = dataset_record(
            self.dtype,
            sequences=len(lengths),
            documents=len(self._bounds) - 1,
            tokens=self._tokens,
            max_token_id=self._largest,
            files={
                suffix: {"bytes": sizes[suffix], "xxh3_128": state.hexdigest()}
                for suffix, state in self._hashes.items()
            },
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
        with disk_errors(self.prefix):
            self._files[suffix].write(data)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()
        else:
            self.close()
