"""The interface of samples, the input of batches."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class Samples(Protocol):
    """Implemented by ``SampleStore`` and ``MockSamples``."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample, [n]; one more than its labels."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int, /) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """(tokens, mask) of a sample; mask is 1 where a token has loss."""

    def digest(self) -> str:
        """Equal only for the same samples in the same order."""
