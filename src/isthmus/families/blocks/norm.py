"""Norms of hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class Norm:
    prefix: ClassVar[str] = ""

    norm_epsilon: float
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    norm_weight: bool = True
    """Norms have weights; without them they have no biases either."""
    norm_bias: bool = True
    norm_zero_centered: bool = False
    """Norms multiply by one plus their weight."""

    @property
    def statistics(self) -> int:
        """Float32 numbers of a token that the backward pass needs."""
        return 2 if self.normalization == "LayerNorm" else 1
