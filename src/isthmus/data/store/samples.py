"""What batches are made of, whether it lies in files or is made up on the way."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class Samples(Protocol):
    """Numbered samples; ``SampleStore`` and ``MockSamples`` are some."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample, [n]; one more than it has labels."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int, /) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Tokens of a sample, and 1 where a token is learned as a target."""

    def digest(self) -> str:
        """Equal only where sample k is the same."""
