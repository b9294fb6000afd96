"""Delta nets: linear attention whose state forgets and corrects its values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from isthmus.families.blocks.block import NO_SETTING, Linear, MicroBatch, Recurrence, RehearsalSizes, common_heads

_CHUNK = 64
"""Tokens that the scan computes at a time."""


@dataclass(frozen=True, kw_only=True)
class DeltaNet(Recurrence):
    """Gated delta net (arXiv 2412.06464).

    Kimi delta attention (arXiv 2510.26692) has a decay for each channel, and as many key heads as value heads.
    """

    prefix: ClassVar[str] = "delta_net"
    kinds: ClassVar[tuple[str, ...]] = ("gated_delta_net", "kimi_delta_attention")
    kind: str = field(default="gated_delta_net", metadata=NO_SETTING, repr=False)

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    """Tokens of the causal convolution of queries, keys and values, including the token itself."""
    norm_epsilon: float = 1e-6
    """Epsilon of the norm of the outputs."""
    negative_eigenvalues: bool = False
    """Learning rates are up to 2 instead of 1."""
    low_rank_gates: bool = True
    """Kimi delta attention: decays and output gates have low-rank projections; otherwise full ones."""
    least_log_decay: float | None = None
    """Kimi delta attention: log decays are this number times ``sigmoid(exp(A) * (x + bias))``; None:
    ``-exp(A) * softplus(x + bias)``."""

    @property
    def key_width(self) -> int:
        """Channels of the keys of all heads."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Channels of the values of all heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def _is_gated(self) -> bool:
        return self.kind == "gated_delta_net"

    @property
    def inner_channels(self) -> int:
        return self.value_width

    def linears(self, tp: int = 1) -> list[Linear]:
        """Queries, keys, values, learning rates, decays and output gates; then the output projection."""
        keys, values, heads, hidden = self.key_width, self.value_width, self.num_value_heads, self.hidden_size
        inputs = 2 * keys + values + heads
        output = Linear(hidden, values / tp, "row")
        if self._is_gated:
            return [Linear((inputs + values + heads) / tp, hidden, "column"), output]
        if not self.low_rank_gates:
            return [Linear((inputs + keys + values) / tp, hidden, "column"), output]
        rank = self.value_head_dim
        return [
            Linear(inputs / tp, hidden, "column"),
            Linear(2 * rank, hidden, fp8=False),
            Linear((keys + values) / tp, rank, "column", fp8=False),
            output,
        ]

    @property
    def convolution_weights(self) -> int:
        return self.conv_kernel * (2 * self.key_width + self.value_width)

    @property
    def scan_flops(self) -> int:
        """Decay, readout of the key, correction of the value, update, readout of the query (arXiv 2412.06464, eq. 10).

        7 for each element of the state, as Megatron-LM counts those of Mamba.
        """
        return 7 * self.num_value_heads * self.key_head_dim * self.value_head_dim

    @property
    def scan_depth(self) -> int:
        return 2 * _CHUNK + 3 * self.key_head_dim

    def _channels(self, batch: MicroBatch) -> tuple[int, int, int]:
        decays = self.num_value_heads if self._is_gated else self.key_width
        return 2 * (self.key_width + self.value_width) + self.num_value_heads + decays, 0, 0

    def _chunk_bytes(self, batch: MicroBatch) -> int:
        # In float32, with gradients: about 8 tensors like keys, 6 like values and 8 of pairs in chunks of 64 tokens,
        # states; with decays of channels, about 10 like keys for each of 6 halvings of a chunk.
        keys, values = self.key_head_dim, self.value_head_dim
        head_elements = (8 if self._is_gated else 68) * keys + 6 * values + 8 * _CHUNK + keys * values // _CHUNK
        return 2 * 4 * batch.num_tokens * self.num_value_heads * head_elements // batch.tp

    def state_elements(self, num_tokens: int, tp: int = 1) -> int:
        inputs = (self.conv_kernel - 1) * (2 * self.key_width + self.value_width)
        return (self.num_value_heads * self.key_head_dim * self.value_head_dim + inputs) // tp

    def symbols(self) -> dict[str, int]:
        return {
            "Lk": self.key_width,
            "Lv": self.value_width,
            "Lm": self.num_key_heads,
            "Ln": self.num_value_heads,
            "Ld": self.value_head_dim,
            "Lc": self.conv_kernel,
        }

    def divided_sizes(self) -> list[tuple[str, int]]:
        return [("num_key_heads of the delta net", self.num_key_heads)]

    def invalid_reason(self) -> str | None:
        if self.num_value_heads % self.num_key_heads:
            return f"{self.num_key_heads} key heads do not divide {self.num_value_heads} value heads"
        return None

    def small(self, sizes: RehearsalSizes) -> DeltaNet:
        keys = common_heads(self.num_key_heads, sizes.heads)
        values = keys * min(self.num_value_heads // self.num_key_heads, 2)
        width = sizes.least
        return replace(self, num_key_heads=keys, num_value_heads=values, key_head_dim=width, value_head_dim=width)
