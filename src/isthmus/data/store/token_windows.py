"""Windows of equal length over the tokens of large prepared sets, which need no memory for each window.

A set of 10^12 tokens has 10^9 documents and 10^8 windows: arrays of their starts and lengths, and bins of documents,
would take hours and hundreds of gigabytes on each rank. Windows over all documents, one after the other, are computed
from their number, as in Megatron-LM.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from isthmus.data.store.indexed_dataset import map_file
from isthmus.data.store.manifest import check_sizes, indexed_file, listed_file, read_manifest
from isthmus.data.store.mixture import COMPUTED_FROM, permuted
from isthmus.data.store.sample_store import Int64, TokenSource, UInt8, split_counts

_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class _WindowPart:
    """Windows of some files, in the order of a permutation."""

    sources: tuple[TokenSource, ...]
    ends: tuple[int, ...]
    """Windows of the sources up to each, cumulative."""
    first: int
    count: int
    """The windows of this part, in that order."""
    keys: tuple[int, ...] = ()
    """Keys of the permutation; empty: the order of the files."""

    def window(self, index: int) -> tuple[TokenSource, int]:
        """(source, number of the window in it)."""
        number = self.first + index
        if self.keys:
            position, keys = np.array([number], np.uint64), np.array(self.keys, np.uint64)
            number = int(permuted(position, self.ends[-1], keys)[0])
        chosen = bisect_right(self.ends, number)
        return self.sources[chosen], number - (self.ends[chosen - 1] if chosen else 0)


class TokenWindows:
    """Samples of ``targets`` + 1 tokens; adjacent windows share one, and the rest of a file is left out."""

    def __init__(self, parts: Sequence[_WindowPart], targets: int) -> None:
        self._parts = tuple(parts)
        self.targets = targets
        self._ends = np.cumsum([part.count for part in parts]).tolist()

    @classmethod
    def from_sources(cls, sources: Sequence[TokenSource], targets: int) -> TokenWindows:
        counts = [num_windows(len(source.tokens), targets) for source in sources]
        ends = tuple(np.cumsum(counts).tolist())
        return cls([_WindowPart(tuple(sources), ends, 0, ends[-1])], targets)

    @classmethod
    def joined(cls, stores: Sequence[TokenWindows]) -> TokenWindows:
        """The windows of several sets, one after the other."""
        return cls([part for store in stores for part in store._parts], stores[0].targets)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[npt.NDArray[Any], UInt8]:
        """(tokens, mask) of a window, as views; DataError if the file contains an invalid token."""
        source, window = self.place(index)
        start = window * self.targets
        return source.read(start, start + self.targets + 1)

    def place(self, index: int) -> tuple[TokenSource, int]:
        """(source, number of the window in it) of a sample."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        chosen = bisect_right(self._ends, index)
        return self._parts[chosen].window(index - (self._ends[chosen - 1] if chosen else 0))

    @property
    def lengths(self) -> Int64:
        """Tokens of each sample, [n]; a view of one number."""
        return np.broadcast_to(np.int64(self.targets + 1), (len(self),))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all samples; tokens that two samples share count twice."""
        return len(self) * (self.targets + 1)

    @property
    def max_token_id(self) -> int:
        """An upper bound of the token ids."""
        return max(source.max_token_id for part in self._parts for source in part.sources)

    def split(self, fractions: Sequence[float], *, seed: int) -> tuple[TokenWindows, list[TokenWindows]]:
        """Split off one part per fraction: (the rest, parts), each in an order of its own.

        Raises:
            UsageError: as :func:`isthmus.data.store.sample_store.split`.
        """
        (part,) = self._parts
        counts = split_counts(len(self), fractions)
        bits = np.random.Philox(key=np.array([seed % 2**64, 1 << 63], dtype=np.uint64)).random_raw(_ROUNDS)
        first, parts = 0, list[TokenWindows]()
        for count in counts:
            chosen = replace(part, first=first, count=count, keys=tuple(bits.tolist()))
            parts.append(TokenWindows([chosen], self.targets))
            first += count
        rest = replace(part, first=first, count=len(self) - first, keys=tuple(bits.tolist()))
        return TokenWindows([rest], self.targets), parts

    def digest(self) -> str:
        """A hash of files and windows: equal only for the same windows of the same files in the same order."""
        content = [
            ([source.content for source in part.sources], part.ends, part.first, part.count, part.keys)
            for part in self._parts
        ]
        return xxhash.xxh3_128(repr((self.targets, content)).encode()).hexdigest()


def num_windows(tokens: int, targets: int) -> int:
    return max(0, (tokens - 1) // targets)


def are_many(manifests: Sequence[Path], targets: int) -> bool:
    """Whether prepared files have so many windows that their order is computed; their manifests are read."""
    records = [read_manifest(path)["pair"] for path in manifests if path.is_file()]
    return sum(num_windows(record.get("tokens", 0), targets) for record in records) >= COMPUTED_FROM


def token_source(prefix: str, manifest: Path) -> tuple[TokenSource, dict[str, Any]]:
    """The tokens of prepared text, and its manifest. The .idx is compared by its size: it may have 20 GB.

    Raises:
        MissingInput: a file does not exist.
        DataError: a file has another size than in the manifest.
    """
    record = read_manifest(manifest)
    check_sizes(prefix, record, manifest)
    pair = record["pair"]
    file = indexed_file(prefix, ".bin")
    tokens = map_file(file, np.dtype(pair["dtype"]).newbyteorder("<"))
    content = ":".join(pair["files"][suffix]["xxh3_128"] for suffix in sorted(pair["files"]))
    listed = listed_file(prefix, ".bin", record, tokens)
    checksums = () if listed is None else ((listed, tokens.itemsize),)
    return TokenSource(tokens, None, pair["max_token_id"], content, file, checksums), record
