"""Sizes and settings of the mixers of tokens: kinds of attention, delta nets, state spaces, short convolutions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowAttention:
    """Sizes of the attention in sliding-window layers. None: the same as in layers with full attention."""

    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    kv_channels: int | None = None
    value_channels: int | None = None
    rotary_percent: float | None = None
    attention_sinks: bool | None = None
    values_are_keys: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mla:
    """Multi-head latent attention (arXiv 2405.04434): low-rank projections of queries, keys and values."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    """None: queries have no low-rank projection."""
    norm_epsilon: float = 1e-6
    """Epsilon of the norms of the low-rank vectors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaNet:
    """Gated delta net (arXiv 2412.06464): linear attention whose state forgets and corrects its values.

    Kimi delta attention (arXiv 2510.26692) has a decay for each channel, and as many key heads as value heads.
    """

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

    def invalid_reason(self) -> str | None:
        if self.num_value_heads % self.num_key_heads:
            return f"{self.num_key_heads} key heads do not divide {self.num_value_heads} value heads"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyIndexer:
    """Selection of the keys that a query attends to, if there are more than ``top_k`` (DeepSeek-V3.2)."""

    top_k: int
    num_heads: int
    head_dim: int
    rotary_interleaved: bool = False
    shared_layers: tuple[int, ...] = ()
    """Layers, counted from 0, that use the selection of the layer before and have no indexer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryScaling:
    """Queries grow with their position p in the sample (arXiv 2501.19399).

    They are multiplied by ``1 + rate * log(1 + floor((p + first) / period))``, after their rotation.
    """

    rate: float
    period: int
    """Tokens."""
    first: int = 0
    """The number of the first token."""
    unrotated_only: bool = False
    """Only in layers without rotary embedding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2:
    """State space duality (arXiv 2405.21060): heads with one decay each; B and C are shared by groups of heads."""

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

    def invalid_reason(self) -> str | None:
        if self.num_heads % self.num_groups:
            return f"{self.num_groups} groups do not divide {self.num_heads} Mamba heads"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba:
    """Selective state space (arXiv 2312.00752) of each channel."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvolution:
    """``C * convolution(B * x)`` of projections B, C and x of the hidden state (LFM2)."""

    kernel: int
    bias: bool = False
    """The convolution and both projections have biases."""
