"""Rotary embedding of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Scaling of rotary frequencies for contexts longer than the original training length.

    ``llama3`` divides the frequencies whose wavelength exceeds ``original_max_position_embeddings /
    low_freq_factor`` by ``factor``, keeps those below ``... / high_freq_factor`` and interpolates in between;
    ``linear`` divides all of them; ``yarn`` (arXiv 2309.00071) interpolates between the dimensions that rotate
    ``beta_fast`` and ``beta_slow`` times within the original length, and scales cosines and sines; ``longrope`` (arXiv
    2402.13753) divides each by its own factor, with one list up to the original length and another beyond it;
    ``ntk_alpha`` multiplies the base by ``factor ** (R / (R - 2))`` for R rotated channels; ``dynamic`` does so for a
    sample of L tokens beyond the original length C, with ``factor * L / C - (factor - 1)`` in place of ``factor``;
    ``proportional`` divides the frequencies by ``factor`` and rotates only the first ``partial_rotary_factor`` of the
    pairs of a head, whose frequencies are those of a head with all pairs rotated.
    """

    kind: Literal["llama3", "linear", "yarn", "longrope", "ntk_alpha", "dynamic", "proportional"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """YaRN: whether the bounds of the interpolation are rounded to whole dimensions."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    """Multiplier of cosines and sines; None: derived from the factor."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Rotary:
    prefix: ClassVar[str] = ""

    rotary_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_percent: float = 1.0
    """Fraction of a head's channels that are rotated: the first ones."""
    rotary_interleaved: bool = False
    """Rotary pairs are adjacent channels; otherwise one channel of each half."""
    rotary_reversed: bool = False
    """Rotations are by the opposite angles."""


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
