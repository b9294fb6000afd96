"""``C * convolution(B * x)`` of projections B, C and x of the hidden state (LFM2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from isthmus.families.blocks.block import NO_SETTING, Linear, MicroBatch, Recurrence, RehearsalSizes


@dataclass(frozen=True, kw_only=True)
class ShortConvolution(Recurrence):
    prefix: ClassVar[str] = "short_convolution"
    kinds: ClassVar[tuple[str, ...]] = ("short_convolution",)
    kind: str = field(default="short_convolution", metadata=NO_SETTING, repr=False)

    kernel: int
    bias: bool = False
    """The convolution and both projections have biases."""

    @property
    def inner_channels(self) -> int:
        return self.hidden_size

    def linears(self, tp: int = 1) -> list[Linear]:
        hidden = self.hidden_size
        return [Linear(3 * hidden / tp, hidden, "column"), Linear(hidden, hidden / tp, "row")]

    @property
    def convolution_weights(self) -> int:
        return self.hidden_size * self.kernel

    def _channels(self, batch: MicroBatch) -> tuple[int, int, int]:
        return 3 * self.hidden_size, 2 * self.hidden_size, 0

    def state_elements(self, num_tokens: int, tp: int = 1) -> int:
        return (self.kernel - 1) * self.hidden_size // tp

    def symbols(self) -> dict[str, int]:
        return {"Sk": self.kernel}

    def divided_sizes(self) -> list[tuple[str, int]]:
        return [("hidden_size", self.hidden_size)]

    def small(self, sizes: RehearsalSizes) -> ShortConvolution:
        return self
