"""Samples as three flat arrays, in memory or mapped from a folder.

A folder holds ``tokens.bin`` (int32), ``mask.bin`` (uint8), ``offsets.bin`` and ``groups.bin`` (int64), little-endian,
and ``store.json`` with their lengths. It appears under its name only when everything in it is on the disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isthmus.errors import DataError, IOFailure, MissingInput, NoSpace

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
_FORMAT = 1
_DTYPES = {"tokens": "<i4", "mask": "|u1", "offsets": "<i8", "groups": "<i8"}


class SampleStore:
    """Token sequences with a mask of the tokens that are learned as targets.

    ``tokens`` [total] int32; ``mask`` [total] uint8, ``mask[i] = 1``: token i is a target; ``offsets`` [n + 1] int64,
    sample k is ``offsets[k]:offsets[k + 1]``; ``groups`` [n] int64, the same for samples that
    repeat each other's text, as those of one conversation do (they never lie on both sides of a split).
    """

    def __init__(self, tokens: Int32, mask: UInt8, offsets: Int64, groups: Int64 | None = None) -> None:
        """Take the arrays as they are, without a copy.

        Raises:
            DataError: their lengths disagree.
        """
        self.tokens, self.mask, self.offsets = tokens, mask, offsets
        self.groups = np.arange(len(offsets) - 1, dtype=np.int64) if groups is None else groups
        if len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(tokens) or len(mask) != len(tokens):
            ends = int(offsets[-1]) if len(offsets) else "nothing"
            raise DataError(
                f"sample store: offsets end at {ends}, but there are {len(tokens)} tokens, {len(mask)} mask entries. "
                "Prepare the data again."
            )
        if len(self.groups) != len(offsets) - 1 or bool(np.any(np.diff(offsets) < 0)):
            raise DataError("sample store: offsets go backwards or disagree with groups. Prepare the data again.")

    @classmethod
    def from_samples(
        cls, samples: Sequence[tuple[Sequence[int] | Int32, Sequence[int] | UInt8]], groups: Sequence[int] | None = None
    ) -> SampleStore:
        """Pack (tokens, mask) pairs into one store."""
        lengths = np.fromiter((len(tokens) for tokens, _ in samples), dtype=np.int64, count=len(samples))
        offsets = np.zeros(len(samples) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        tokens = np.empty(int(offsets[-1]), dtype=np.int32)
        mask = np.empty(int(offsets[-1]), dtype=np.uint8)
        for (ids, learned), start, end in zip(samples, offsets[:-1], offsets[1:], strict=True):
            tokens[start:end] = ids
            mask[start:end] = learned
        return cls(tokens, mask, offsets, None if groups is None else np.asarray(groups, dtype=np.int64))

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[Int32, UInt8]:
        """(tokens, mask) of one sample, as views."""
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.tokens[part], self.mask[part]

    @property
    def lengths(self) -> Int64:
        """Tokens in each sample, [n]."""
        return np.diff(self.offsets)

    @property
    def max_token_id(self) -> int:
        """The largest id that occurs; a model's vocabulary must be larger."""
        return int(self.tokens.max()) if len(self.tokens) else -1

    @property
    def num_learned(self) -> int:
        """Tokens that are learned as targets in one epoch (the first token of a sample never is)."""
        firsts = self.offsets[:-1][self.lengths > 0]
        return int(self.mask.sum(dtype=np.int64)) - int(self.mask[firsts].sum(dtype=np.int64))

    def select(self, indices: Sequence[int] | Int64) -> SampleStore:
        """A store of these samples in this order, copied."""
        chosen = [int(index) for index in indices]
        return SampleStore.from_samples([self[index] for index in chosen], [int(self.groups[k]) for k in chosen])

    def digest(self) -> str:
        """A hash of tokens, masks and boundaries: equal only for the same training data in the same order."""
        hasher = hashlib.blake2b(digest_size=16)
        for name in ("tokens", "mask", "offsets"):
            hasher.update(np.ascontiguousarray(getattr(self, name)).data)
        return hasher.hexdigest()

    def save(self, folder: Path | str) -> None:
        """Write the store to a new folder, whole or not at all.

        Raises:
            NoSpace: the folder exists already, or the disk is full.
            IOFailure: writing failed for another reason.
        """
        folder = Path(folder)
        if folder.exists():
            raise NoSpace(f"{folder} exists already. Remove it or name another folder.")
        staged: Path | None = None
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            staged = Path(tempfile.mkdtemp(prefix=f".tmp-{folder.name}-", dir=folder.parent))
            for name, dtype in _DTYPES.items():
                array = np.ascontiguousarray(getattr(self, name), dtype=dtype)
                _write(staged / f"{name}.bin", array.data)
            sizes = {name: len(getattr(self, name)) for name in _DTYPES}
            meta = {"format": _FORMAT, "lengths": sizes, "max_token_id": self.max_token_id}
            _write(staged / "store.json", json.dumps(meta, indent=1).encode() + b"\n")
            staged.chmod(0o755)
            staged.rename(folder)
            staged = None
            _sync_folder(folder.parent)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                need = sum(getattr(self, name).nbytes for name in _DTYPES)
                raise NoSpace(f"{folder}: the disk is full; the samples need {need} bytes.") from error
            raise IOFailure(f"{folder}: cannot be written: {error.strerror or error}.") from error
        finally:
            if staged is not None:
                shutil.rmtree(staged, ignore_errors=True)

    @classmethod
    def open(cls, folder: Path | str) -> SampleStore:
        """Map a saved store into memory, read-only; its tokens are read when they are used.

        Raises:
            MissingInput: there is no store in the folder.
            DataError: a file of it is damaged or cut short.
        """
        folder = Path(folder)
        try:
            meta = json.loads((folder / "store.json").read_bytes())
            arrays = {name: _map(folder / f"{name}.bin", dtype, meta) for name, dtype in _DTYPES.items()}
        except FileNotFoundError as error:
            raise MissingInput(f"{error.filename}: no such file, so {folder} is no sample store.") from error
        except OSError as error:
            raise IOFailure(f"{folder}: cannot be read: {error.strerror or error}.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder}/store.json is damaged: {error!r}. Prepare the data again.") from error
        return cls(arrays["tokens"], arrays["mask"], arrays["offsets"], arrays["groups"])


def _map(path: Path, dtype: str, meta: dict[str, Any]) -> npt.NDArray[Any]:
    if meta["format"] != _FORMAT:
        raise DataError(
            f"{path.parent}: sample store format {meta['format']}, wanted {_FORMAT}. Prepare the data again."
        )
    length = int(meta["lengths"][path.stem])
    want, got = length * np.dtype(dtype).itemsize, path.stat().st_size
    if want != got:
        raise DataError(f"{path}: {got} bytes, wanted {want}. Is it cut short? Prepare the data again.")
    if not length:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(length,))


def _write(path: Path, data: Any) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
