"""Samples as a view: stretches of token arrays, which lie in memory or in files and are never copied."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from isthmus.atomic_write import TEMPORARY, rename
from isthmus.data.store.indexed_dataset import (
    IndexedDataset,
    IndexedWriter,
    indexed_file,
    open_indexed,
    scan_indexed,
    token_dtype,
    write_manifest,
)
from isthmus.errors import DataError, MissingInput, NoSpace, disk_errors

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
_NAME = "samples"
_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class TokenSource:
    """An array of tokens that samples are stretches of."""

    tokens: npt.NDArray[Any]
    """[total], of any integer dtype."""
    mask: UInt8 | None
    """[total], 1: the token is learned as a target; None: all are."""
    max_token_id: int
    """No token is larger."""
    content: str
    """A hash of tokens and mask."""
    file: Path | None = None
    """Where it is mapped from."""

    @classmethod
    def of_arrays(cls, tokens: npt.NDArray[Any], mask: UInt8 | None) -> TokenSource:
        """Arrays in memory; both are read once."""
        content = xxhash.xxh3_128(np.ascontiguousarray(tokens).data)
        if mask is not None:
            content.update(np.ascontiguousarray(mask).data)
        return cls(tokens, mask, int(tokens.max()) if len(tokens) else -1, content.hexdigest())

    @classmethod
    def from_indexed(cls, pair: IndexedDataset) -> TokenSource:
        """A pair of indexed files; nothing of it is read if it has a manifest."""
        record = pair.manifest["pair"] if pair.manifest is not None else scan_indexed(pair)
        content = ":".join(record["files"][suffix]["xxh3_128"] for suffix in sorted(record["files"]))
        return cls(pair.tokens, pair.mask, record["max_token_id"], content, indexed_file(pair.prefix, ".bin"))


class SampleStore:
    """Token sequences with a mask of the tokens that are learned as targets.

    Sample k is ``lengths[k]`` tokens of ``sources[which[k]]`` from ``starts[k]`` on, all [n] int64; stretches may share
    tokens. ``groups`` [n] int64 is the same for samples that repeat each other's text, as those of one conversation do
    (they never lie on both sides of a split).
    """

    def __init__(
        self,
        sources: Sequence[TokenSource],
        starts: Int64,
        lengths: Int64,
        groups: Int64 | None = None,
        which: npt.NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """Take the arrays as they are, without a copy; without ``which`` all samples lie in the one source.

        Raises:
            DataError: a stretch reaches beyond its source, or the arrays are not of one length.
        """
        self.sources, self.starts, self.lengths = tuple(sources), starts, lengths
        self.groups = np.arange(len(starts), dtype=np.int64) if groups is None else groups
        self.which = np.zeros(len(starts), dtype=np.int16) if which is None else which
        if not len(starts) == len(lengths) == len(self.groups) == len(self.which):
            raise DataError("sample store: starts, lengths and groups disagree in number. Prepare the data again.")
        totals = np.array([len(source.tokens) for source in self.sources] or [0], dtype=np.int64)
        if len(starts) and (
            int(starts.min()) < 0 or int(lengths.min()) < 0 or bool(np.any(starts + lengths > totals[self.which]))
        ):
            raise DataError("sample store: a sample reaches beyond the tokens. Prepare the data again.")

    @classmethod
    def from_samples(
        cls, samples: Sequence[tuple[Sequence[int] | Int32, Sequence[int] | UInt8]], groups: Sequence[int] | None = None
    ) -> SampleStore:
        """Put (tokens, mask) pairs end to end."""
        lengths = np.fromiter((len(tokens) for tokens, _ in samples), dtype=np.int64, count=len(samples))
        ends = np.cumsum(lengths)
        tokens = np.empty(int(lengths.sum()), dtype=np.int32)
        mask = np.empty(len(tokens), dtype=np.uint8)
        for (ids, learned), end, length in zip(samples, ends, lengths, strict=True):
            tokens[end - length : end] = ids
            mask[end - length : end] = learned
        source = TokenSource.of_arrays(tokens, mask)
        return cls([source], ends - lengths, lengths, None if groups is None else np.asarray(groups, dtype=np.int64))

    @classmethod
    def from_indexed(cls, pair: IndexedDataset) -> SampleStore:
        """Each sequence of a pair is a sample, each document a group."""
        groups = np.repeat(np.arange(len(pair.documents) - 1, dtype=np.int64), np.diff(pair.documents))
        return cls([TokenSource.from_indexed(pair)], pair.starts, pair.lengths, groups)

    @classmethod
    def concatenated(cls, stores: Sequence[SampleStore]) -> SampleStore:
        """The samples of several stores, one store after the other; groups of different stores stay apart."""
        sources = [source for store in stores for source in store.sources]
        groups, which = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int32)]
        group = source = 0
        for store in stores:
            groups.append(store.groups + group)
            which.append((store.which + source).astype(np.int32))
            group += int(store.groups.max()) + 1 if len(store) else 0
            source += len(store.sources)
        starts, lengths = (
            np.concatenate([np.empty(0, dtype=np.int64), *(getattr(store, name) for store in stores)])
            for name in ("starts", "lengths")
        )
        return cls(sources, starts, lengths, np.concatenate(groups), np.concatenate(which))

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[Any], UInt8]:
        """(tokens, mask) of one sample, as views.

        Raises:
            DataError: a file holds a token that was not in it when it was made.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        source = self.sources[int(self.which[index])]
        part = slice(int(self.starts[index]), int(self.starts[index] + self.lengths[index]))
        tokens = source.tokens[part]
        mask = np.broadcast_to(np.uint8(1), len(tokens)) if source.mask is None else source.mask[part]
        if source.file is not None and len(tokens):
            # The whole file is not read when a run begins, and an embedding given a wrong token may end the process.
            if not 0 <= tokens.min() <= tokens.max() <= source.max_token_id or mask.max() > 1:
                raise DataError(
                    f"{source.file}: tokens {part.start} to {part.stop} or their mask hold what was not there when the "
                    f"file was made (ids to {source.max_token_id}). It is damaged; copy it again, or prepare it again."
                )
        return tokens, mask

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples; those that two samples share count twice."""
        return int(self.lengths.sum())

    @property
    def max_token_id(self) -> int:
        """No id is larger; a model's vocabulary must be."""
        return max((source.max_token_id for source in self.sources), default=-1)

    @property
    def num_learned(self) -> int:
        """Tokens that are learned as targets in one epoch (the first token of a sample never is)."""
        return sum(int(np.count_nonzero(self[k][1][1:])) for k in range(len(self)))

    def select(self, indices: Sequence[int] | npt.NDArray[np.integer[Any]]) -> SampleStore:
        """A store of these samples in this order; no token is copied."""
        chosen = np.asarray(indices, dtype=np.int64)
        parts = (self.starts[chosen], self.lengths[chosen], self.groups[chosen], self.which[chosen])
        return SampleStore(self.sources, *parts)

    def cut(self, length: int) -> SampleStore:
        """The same samples, of at most the first ``length`` tokens."""
        return SampleStore(self.sources, self.starts, np.minimum(self.lengths, length), self.groups, self.which)

    @cached_property
    def _digest(self) -> str:
        hasher = xxhash.xxh3_128(" ".join(source.content for source in self.sources).encode())
        for array in (self.which.astype(np.int32), self.starts, self.lengths):
            hasher.update(np.ascontiguousarray(array).data)
        return hasher.hexdigest()

    def digest(self) -> str:
        """A hash of where the samples lie and of what lies there: equal only for the same samples in the same order.

        Samples that were saved, or cut out of others, have another digest than equal ones that were not.
        """
        return self._digest

    def save(self, folder: Path | str) -> None:
        """Write the samples to a new folder as a pair of indexed files, whole or not at all.

        A sample is a sequence; neighbours of one group are a document.

        Raises:
            NoSpace: the folder exists already, or the disk is full.
            IOFailure: writing failed for another reason.
        """
        folder = Path(folder)
        if folder.exists():
            raise NoSpace(f"{folder} exists already. Remove it or name another folder.")
        staged = folder.with_name(f"{TEMPORARY}{folder.name}")
        masked = any(source.mask is not None for source in self.sources)
        with disk_errors(folder):
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)
        try:
            with IndexedWriter(staged / _NAME, token_dtype(self.max_token_id + 1), masked) as writer:
                for first in range(0, len(self), _AT_ONCE):
                    parts = [self[k] for k in range(first, min(first + _AT_ONCE, len(self)))]
                    tokens, mask = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
                    writer.extend(tokens, self.lengths[first : first + _AT_ONCE], mask if masked else None)
                starts = np.flatnonzero(np.diff(self.groups, prepend=-1 - self.groups[:1]))
                writer.end_documents(np.diff(starts, append=len(self)))
            write_manifest(staged / _NAME, {"pair": writer.close()})
            with disk_errors(folder):
                rename(staged, folder)
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    @classmethod
    def open(cls, folder: Path | str) -> SampleStore:
        """Map saved samples into memory, read-only; tokens are read when they are used.

        Raises:
            MissingInput: there are none in the folder.
            DataError: a file is damaged or cut short.
        """
        prefix = Path(folder) / _NAME
        if not indexed_file(prefix, ".json").is_file():
            raise MissingInput(f"{prefix}.json: no such file, so {folder} holds no samples of this version.")
        return cls.from_indexed(open_indexed(prefix))
