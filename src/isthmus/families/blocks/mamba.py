"""Selective state space (arXiv 2312.00752) of each channel."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from isthmus.families.blocks.block import NO_SETTING, Linear, MicroBatch, Recurrence, RehearsalSizes

_BLOCK = 64
"""Tokens between the states that the scan saves."""


@dataclass(frozen=True, kw_only=True)
class Mamba(Recurrence):
    prefix: ClassVar[str] = "mamba"
    kinds: ClassVar[tuple[str, ...]] = ("mamba",)
    kind: str = field(default="mamba", metadata=NO_SETTING, repr=False)

    inner_size: int
    """Channels."""
    state_size: int
    time_step_rank: int
    kernel: int
    """Taps of the convolution of the channels."""
    conv_bias: bool = True
    proj_bias: bool = False
    """The input and output projections have biases."""
    norms: bool = False
    """The low-rank time steps, B and C are normalized."""
    norm_weights: bool = True
    """These norms have learned gains."""
    norm_epsilon: float | None = None
    """Epsilon of these norms; None: that of the layer's norm."""

    @property
    def inner_channels(self) -> int:
        return self.inner_size

    @property
    def selected_channels(self) -> int:
        """Columns of the projection to time steps, B and C."""
        return self.time_step_rank + 2 * self.state_size

    def linears(self, tp: int = 1) -> list[Linear]:
        inner = self.inner_size / tp
        return [
            Linear(2 * inner, self.hidden_size, "column"),
            Linear(self.selected_channels, inner, fp8=False),
            Linear(inner, self.time_step_rank, fp8=False),
            Linear(self.hidden_size, inner, "row"),
        ]

    @property
    def convolution_weights(self) -> int:
        return self.inner_size * self.kernel

    @property
    def scan_flops(self) -> int:
        """7 for each element of the state, as ``mamba_layer_flops`` in the training loop of Megatron-LM."""
        return 7 * self.inner_size * self.state_size

    def _channels(self, batch: MicroBatch) -> tuple[int, int, int]:
        inner, tokens = self.inner_size, batch.num_tokens
        selected = 4 * batch.tp * self.selected_channels  # small, and not divided by tp
        float32 = tokens * (3 * inner + selected) + -(-tokens // _BLOCK) * inner * self.state_size
        return 2 * inner, inner, float32

    def _chunk_bytes(self, batch: MicroBatch) -> int:
        return 6 * 4 * min(_BLOCK, batch.num_tokens) * self.inner_size * self.state_size // batch.tp

    def state_elements(self, num_tokens: int, tp: int = 1) -> int:
        return self.inner_size * (self.state_size + self.kernel - 1) // tp

    def symbols(self) -> dict[str, int]:
        return {
            "Ci": self.inner_size,
            "Cs": self.state_size,
            "Cr": self.time_step_rank,
            "Ck": self.kernel,
            "Cx": self.selected_channels,
        }

    def divided_sizes(self) -> list[tuple[str, int]]:
        return [("channels of Mamba", self.inner_size)]

    def small(self, sizes: RehearsalSizes) -> Mamba:
        """The channels stay the same multiple of the hidden size."""
        channels = self.inner_size // self.hidden_size * sizes.hidden_size
        return replace(self, inner_size=channels, time_step_rank=sizes.least)
