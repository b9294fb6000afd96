"""Samples as slices of token arrays in memory or in mapped files, without copies; validation and test splits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from isthmus.data.store.indexed_dataset import IndexedDataset, indexed_file, scan_indexed
from isthmus.errors import DataError, UsageError
from isthmus.files.checked_files import ListedFile

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]
MOCK_SAMPLES = 2**20
"""Number of different samples."""
_MOCK_PARTS = ("train", "valid", "test")
_MOCK_STREAM = 1 << 62
"""Separates the generator keys from those of the sample order, which are epochs."""


class Samples(Protocol):
    """Token sequences: :class:`SampleStore` and ``MockSamples``."""

    @property
    def lengths(self) -> Int64:
        """Tokens of each sample, [n]; one more than its labels."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Int32, UInt8]:
        """(tokens, mask) of a sample; mask is 1 where a token has loss."""

    def digest(self) -> str:
        """Equal only for the same samples in the same order."""


class Answers(Samples, Protocol):
    """Samples that are answers to prompts."""

    @property
    def groups(self) -> Int64:
        """[n], equal for samples of one record."""

    @property
    def values(self) -> Float32:
        """[n], the label of an answer, or the margin of its pair."""


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """The fields of the records of prompts, as lines of JSON."""

    lines: UInt8
    ends: Int64
    """[n], end of the line of each sequence."""
    starts: Int64
    """[n], first token of each sequence, ascending."""

    def of(self, start: int) -> dict[str, Any]:
        """The fields of the sequence that begins at token ``start``."""
        sequence = int(np.searchsorted(self.starts, start, side="right")) - 1
        first = int(self.ends[sequence - 1]) if sequence else 0
        columns: dict[str, Any] = json.loads(self.lines[first : int(self.ends[sequence])].tobytes())
        return columns


@dataclass(frozen=True, slots=True)
class TokenSource:
    tokens: npt.NDArray[Any]
    """[total], of any integer dtype."""
    mask: UInt8 | None
    """[total], 1 where the token has loss; None: all tokens."""
    max_token_id: int
    content: str
    """A hash of tokens and mask."""
    file: Path | None = None
    """The mapped file."""
    checksums: tuple[tuple[ListedFile, int], ...] = ()
    """As of :class:`IndexedDataset`."""
    columns: RecordColumns | None = None
    """Fields of the records of prompts; None for other samples."""

    def check(self, start: int, stop: int) -> None:
        """Check the blocks of the files that have these tokens and their mask; DataError if they changed."""
        for listed, itemsize in self.checksums:
            listed.check(start * itemsize, stop * itemsize)

    def read(self, start: int, stop: int) -> tuple[npt.NDArray[Any], UInt8]:
        """(tokens, mask) as views; DataError if the file contains an invalid token."""
        tokens = self.tokens[start:stop]
        mask = np.broadcast_to(np.uint8(1), len(tokens)) if self.mask is None else self.mask[start:stop]
        self.check(start, stop)
        if self.file is not None and len(tokens):
            # Checked on access, since a run does not read whole files; an invalid token may crash the embedding.
            if not 0 <= tokens.min() <= tokens.max() <= self.max_token_id or mask.max() > 1:
                raise DataError(
                    f"{self.file}: tokens {start} to {stop} or their mask changed since the file was written (ids to "
                    f"{self.max_token_id}). It is damaged; copy it again, or prepare it again."
                )
        return tokens, mask

    @classmethod
    def from_arrays(cls, tokens: npt.NDArray[Any], mask: UInt8 | None) -> TokenSource:
        content = xxhash.xxh3_128(np.ascontiguousarray(tokens).data)
        if mask is not None:
            content.update(np.ascontiguousarray(mask).data)
        return cls(tokens, mask, int(tokens.max()) if len(tokens) else -1, content.hexdigest())

    @classmethod
    def from_indexed(cls, indexed: IndexedDataset) -> TokenSource:
        """Indexed files; with a manifest, nothing is read."""
        record = indexed.manifest["pair"] if indexed.manifest is not None else scan_indexed(indexed)
        content = ":".join(record["files"][suffix]["xxh3_128"] for suffix in sorted(record["files"]))
        file = indexed_file(indexed.prefix, ".bin")
        columns = None
        if indexed.columns is not None:
            columns = RecordColumns(indexed.columns, np.flatnonzero(indexed.columns == ord("\n")) + 1, indexed.starts)
        return cls(indexed.tokens, indexed.mask, record["max_token_id"], content, file, indexed.checksums, columns)


class SampleStore:
    """Token sequences with a loss mask.

    Sample k is ``lengths[k]`` tokens of ``sources[which[k]]`` from ``starts[k]`` on, all [n] int64; samples may share
    tokens. Samples with equal ``groups`` [n] int64 repeat each other's text, such as those of one conversation; a split
    keeps them together. ``values`` [n] float32 are the labels of answers or the margins of pairs, zero by default.
    """

    def __init__(
        self,
        sources: Sequence[TokenSource],
        starts: Int64,
        lengths: Int64,
        groups: Int64 | None = None,
        which: npt.NDArray[np.integer[Any]] | None = None,
        values: Float32 | None = None,
    ) -> None:
        """Without ``which`` all samples are in the first source."""
        self.sources: tuple[TokenSource, ...] = tuple(sources)
        self.starts = starts
        self.lengths = lengths
        self.groups: Int64 = np.arange(len(starts), dtype=np.int64) if groups is None else groups
        self.which: npt.NDArray[np.integer[Any]] = np.zeros(len(starts), dtype=np.int16) if which is None else which
        self.values: Float32 = np.broadcast_to(np.float32(0), len(starts)) if values is None else values
        if not len(starts) == len(lengths) == len(self.groups) == len(self.which) == len(self.values):
            raise DataError("sample store: starts, lengths and groups differ in number. Prepare the data again.")
        totals = np.array([len(source.tokens) for source in self.sources] or [0], dtype=np.int64)
        if len(starts) and (
            int(starts.min()) < 0 or int(lengths.min()) < 0 or bool(np.any(starts + lengths > totals[self.which]))
        ):
            raise DataError("sample store: a sample ends beyond the tokens. Prepare the data again.")

    @classmethod
    def from_samples(
        cls, samples: Sequence[tuple[Sequence[int] | Int32, Sequence[int] | UInt8]], groups: Sequence[int] | None = None
    ) -> SampleStore:
        """A store in memory of (tokens, mask) pairs."""
        lengths = np.array([len(tokens) for tokens, _ in samples], dtype=np.int64)
        tokens = np.concatenate([np.empty(0), *(ids for ids, _ in samples)]).astype(np.int32)
        mask = np.concatenate([np.empty(0), *(marks for _, marks in samples)]).astype(np.uint8)
        source = TokenSource.from_arrays(tokens, mask)
        starts = np.cumsum(lengths) - lengths
        return cls([source], starts, lengths, None if groups is None else np.asarray(groups, dtype=np.int64))

    @classmethod
    def from_indexed(cls, indexed: IndexedDataset) -> SampleStore:
        """Each sequence of indexed files is a sample, each document a group."""
        groups = np.repeat(np.arange(len(indexed.documents) - 1, dtype=np.int64), np.diff(indexed.documents))
        source = TokenSource.from_indexed(indexed)
        return cls([source], indexed.starts, indexed.lengths, groups, values=indexed.values)

    @classmethod
    def concatenated(cls, stores: Sequence[SampleStore]) -> SampleStore:
        """The samples of several stores, with separate groups."""
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
        values = np.concatenate([np.empty(0, np.float32), *(store.values for store in stores)])
        return cls(sources, starts, lengths, np.concatenate(groups), np.concatenate(which), values)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[Any], UInt8]:
        """(tokens, mask) of one sample, as views; DataError if the file contains an invalid token."""
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        start = int(self.starts[index])
        return self.sources[int(self.which[index])].read(start, start + int(self.lengths[index]))

    def columns(self, index: int) -> dict[str, Any]:
        """The fields of the record of a prompt; empty for other samples."""
        columns = self.sources[int(self.which[index])].columns
        return {} if columns is None else columns.of(int(self.starts[index]))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all samples; tokens that two samples share count twice."""
        return int(self.lengths.sum())

    @property
    def max_token_id(self) -> int:
        """An upper bound of the token ids."""
        return max((source.max_token_id for source in self.sources), default=-1)

    def select(self, indices: Sequence[int] | npt.NDArray[np.integer[Any]]) -> SampleStore:
        chosen = np.asarray(indices, dtype=np.int64)
        parts = (self.starts[chosen], self.lengths[chosen], self.groups[chosen], self.which[chosen])
        return SampleStore(self.sources, *parts, self.values[chosen])

    def truncate(self, length: int) -> SampleStore:
        """The same samples, each at most its first ``length`` tokens."""
        lengths = np.minimum(self.lengths, length)
        return SampleStore(self.sources, self.starts, lengths, self.groups, self.which, self.values)

    def windows(self, targets: int, counts: npt.NDArray[np.int64]) -> SampleStore:
        """Sample k as ``counts[k]`` windows of ``targets`` + 1 tokens; adjacent ones share a token."""
        chosen = np.repeat(np.arange(len(self), dtype=np.int64), counts)
        within = (np.arange(len(chosen), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)) * targets
        samples = self.select(chosen)
        lengths = np.minimum(samples.lengths - within, targets + 1)
        return SampleStore(
            self.sources, samples.starts + within, lengths, samples.groups, samples.which, samples.values
        )

    def digest(self) -> str:
        """A hash of sources and slices: equal only for the same slices of the same sources in the same order."""
        hasher = xxhash.xxh3_128(" ".join(source.content for source in self.sources).encode())
        for array in (self.which.astype(np.int32), self.starts, self.lengths):
            hasher.update(np.ascontiguousarray(array).data)
        return hasher.hexdigest()


class MockSamples:
    """Samples of ``seq_length`` loss tokens, uniformly random and generated on access.

    Sample k depends on k and all arguments except ``count``.
    """

    def __init__(
        self,
        *,
        seq_length: int,
        vocab_size: int,
        seed: int,
        part: Literal["train", "valid", "test"] = "train",
        count: int = MOCK_SAMPLES,
    ) -> None:
        """``vocab_size`` is at most 2^31."""
        self._tokens, self._vocab_size, self._seed, self._part = seq_length + 1, vocab_size, seed, part
        self._count = min(count, MOCK_SAMPLES)

    def __len__(self) -> int:
        return self._count

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample, [n]; a view of one number."""
        return np.broadcast_to(np.int64(self._tokens), (self._count,))

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Tokens of a sample, and a mask of ones."""
        if not 0 <= index < self._count:
            raise IndexError(index)
        key = np.array([self._seed % 2**64, _MOCK_STREAM + _MOCK_PARTS.index(self._part)], dtype=np.uint64)
        # The sample index is the counter's highest word, which generating one sample never reaches.
        bits = np.random.Philox(key=key, counter=np.array([0, 0, 0, index], dtype=np.uint64))
        high = bits.random_raw(self._tokens) >> np.uint64(32)
        # Bits times size as in arXiv 1805.10941 (Lemire) without rejection: ids are uniform up to vocab_size / 2^32.
        tokens = (high * np.uint64(self._vocab_size)) >> np.uint64(32)
        return tokens.astype(np.int32), np.ones(self._tokens, dtype=np.uint8)

    def digest(self) -> str:
        """Without the number of samples."""
        return f"mock {self._part} {self._tokens} {self._vocab_size} {self._seed}"


def split(store: SampleStore, fractions: Sequence[float], *, seed: int = 0) -> tuple[SampleStore, list[SampleStore]]:
    """Split off one part per fraction of the groups: (the rest, parts), in store order.

    A group is one conversation or one window of text. Each part with a fraction above 0 gets at least one group, and
    the rest keeps at least one.
    """
    groups, group_of = np.unique(store.groups, return_inverse=True)
    counts = split_counts(len(groups), fractions)
    # Raw bits of a counter-based generator, sorted: unlike numpy's shuffles they never change with its version.
    bits = np.random.Philox(key=np.array([seed % 2**64, 1 << 63], dtype=np.uint64)).random_raw(len(groups))
    drawn = np.argsort(bits, kind="stable")
    part_of = np.full(len(groups), -1)
    for part, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
        part_of[drawn[end - count : end]] = part
    parts = part_of[group_of]
    return store.select(np.flatnonzero(parts < 0)), [
        store.select(np.flatnonzero(parts == part)) for part in range(len(counts))
    ]


def split_counts(groups: int, fractions: Sequence[float]) -> list[int]:
    """How many of ``groups`` each fraction is; at least one of them, and at least one is left.

    Raises:
        UsageError: that is not possible.
    """
    if min(fractions, default=0.0) < 0.0 or sum(fractions) >= 1.0:
        raise UsageError(f"fractions {list(fractions)} cannot be split off. Expected 0 or more, and a sum below 1.")
    counts = [max(1, round(fraction * groups)) if fraction else 0 for fraction in fractions]
    if sum(counts) >= groups:
        raise UsageError(
            f"cannot split off {' and '.join(map(str, counts))} of {groups} samples: at least one must be left to "
            "train on. Use more data, or set data.valid_fraction=0 and data.test_fraction=0."
        )
    return counts
