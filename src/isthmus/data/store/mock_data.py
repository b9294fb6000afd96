"""Mock samples: uniformly random tokens, generated on access."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

COUNT = 2**20
"""Number of different samples."""
_PARTS = ("train", "valid", "test")
_STREAM = 1 << 62
"""Separates the generator keys from those of the sample order, which are epochs."""


class MockSamples:
    """Samples of ``seq_length`` loss tokens; sample k depends on k and all arguments except ``count``."""

    def __init__(
        self,
        *,
        seq_length: int,
        vocab_size: int,
        seed: int,
        part: Literal["train", "valid", "test"] = "train",
        count: int = COUNT,
    ) -> None:
        """``vocab_size`` is at most 2^31."""
        self._tokens, self._vocab_size, self._seed, self._part = seq_length + 1, vocab_size, seed, part
        self._count = min(count, COUNT)

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
        key = np.array([self._seed % 2**64, _STREAM + _PARTS.index(self._part)], dtype=np.uint64)
        # The sample index is the counter's highest word, which generating one sample never reaches.
        bits = np.random.Philox(key=key, counter=np.array([0, 0, 0, index], dtype=np.uint64))
        high = bits.random_raw(self._tokens) >> np.uint64(32)
        # Bits times size as in arXiv 1805.10941 (Lemire) without rejection: ids are uniform up to vocab_size / 2^32.
        tokens = (high * np.uint64(self._vocab_size)) >> np.uint64(32)
        return tokens.astype(np.int32), np.ones(self._tokens, dtype=np.uint8)

    def digest(self) -> str:
        """Without the number of samples."""
        return f"mock {self._part} {self._tokens} {self._vocab_size} {self._seed}"
