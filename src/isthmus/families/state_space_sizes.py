"""Sizes and settings of mixers with a state space or a short convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
    """Of the input and of the output."""
    section_multipliers: tuple[float, float, float, float, float] | None = None
    """Of the outputs of the input projection: z, x, B, C and dt. None: no multipliers."""

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
    """Of these norms; None: that of the layer's norm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvolution:
    """``C * convolution(B * x)`` of projections B, C and x of the hidden state (LFM2)."""

    kernel: int
    bias: bool = False
    """Of the convolution and both projections."""
