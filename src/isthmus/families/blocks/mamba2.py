"""State space duality (arXiv 2405.21060): heads with one decay each; B and C are shared by groups of heads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from isthmus.families.blocks.block import NO_SETTING, Linear, MicroBatch, Recurrence, RehearsalSizes, common_heads

_CHUNK = 128
"""Tokens between the states that the scan saves."""


@dataclass(frozen=True, kw_only=True)
class Mamba2(Recurrence):
    prefix: ClassVar[str] = "mamba2"
    kinds: ClassVar[tuple[str, ...]] = ("mamba2",)
    kind: str = field(default="mamba2", metadata=NO_SETTING, repr=False)

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    kernel: int
    """Taps of the convolution of x, B and C."""
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    norm: Literal["after_gate", "before_gate"] | None = "after_gate"
    """Place of the norm of each group's channels; None: only a gate."""
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    multipliers: tuple[float, float] = (1.0, 1.0)
    """Multipliers of the input and of the output."""
    section_multipliers: tuple[float, float, float, float, float] | None = None
    """Multipliers of the outputs of the input projection: z, x, B, C and dt. None: no multipliers."""

    @property
    def inner_channels(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def group_channels(self) -> int:
        """Channels of B of all groups."""
        return self.num_groups * self.state_size

    @property
    def input_and_output_multipliers(self) -> tuple[float, float]:
        return self.multipliers

    def linears(self, tp: int = 1) -> list[Linear]:
        projected = 2 * self.inner_channels + 2 * self.group_channels + self.num_heads
        return [
            Linear(projected / tp, self.hidden_size, "column"),
            Linear(self.hidden_size, self.inner_channels / tp, "row"),
        ]

    @property
    def convolution_weights(self) -> int:
        return self.kernel * (self.inner_channels + 2 * self.group_channels)

    @property
    def scan_flops(self) -> int:
        """7 for each element of the state, as ``mamba_layer_flops`` in the training loop of Megatron-LM."""
        return 7 * self.inner_channels * self.state_size

    @property
    def scan_depth(self) -> int:
        return _CHUNK + 2 * self.state_size

    def _channels(self, batch: MicroBatch) -> tuple[int, int, int]:
        inner, groups, tokens = self.inner_channels, self.group_channels, batch.num_tokens
        # Ranks that share a group of heads have copies of its B and C.
        copies = 2 * self.state_size * batch.tp if batch.tp > self.num_groups else 0
        float32 = tokens * (3 * self.num_heads + inner) + -(-tokens // _CHUNK) * inner * self.state_size
        return 2 * inner + 2 * groups + self.num_heads, inner + 2 * groups + copies, float32

    def _chunk_bytes(self, batch: MicroBatch) -> int:
        length = min(_CHUNK, batch.num_tokens)
        return 6 * 4 * length * self.num_heads * (length + self.head_dim + self.state_size) // batch.tp

    def state_elements(self, num_tokens: int, tp: int = 1) -> int:
        inputs = (self.kernel - 1) * (self.inner_channels + 2 * self.group_channels)
        return (self.inner_channels * self.state_size + inputs) // tp

    def symbols(self) -> dict[str, int]:
        return {"Mi": self.inner_channels, "Mg": self.group_channels, "Mh": self.num_heads, "Mk": self.kernel}

    def divided_sizes(self) -> list[tuple[str, int]]:
        return [("Mamba heads", self.num_heads), ("channels of B of Mamba", self.group_channels)]

    def tp_mismatch(self, tp: int) -> str | None:
        if (reason := super().tp_mismatch(tp)) is not None:
            return reason
        if self.num_groups % tp and tp % self.num_groups:
            return f"neither divides the {self.num_groups} groups of Mamba heads nor is a multiple of them"
        return None

    def invalid_reason(self) -> str | None:
        if self.num_heads % self.num_groups:
            return f"{self.num_groups} groups do not divide {self.num_heads} Mamba heads"
        return None

    def small(self, sizes: RehearsalSizes) -> Mamba2:
        """The channels stay the same multiple of the hidden size."""
        width = sizes.head_dim * max(1, self.inner_channels // self.hidden_size)
        groups = common_heads(self.num_groups, sizes.heads)
        return replace(self, num_heads=sizes.heads, head_dim=width, state_size=sizes.least, num_groups=groups)
