"""What the time of a mixer other than attention depends on."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.families.architecture import Architecture

MIXERS = frozenset({"mamba2", "mamba", "short_convolution", "gated_delta_net", "kimi_delta_attention"})


@dataclass(frozen=True, slots=True)
class MixerShape:
    """Channels of all tensor-parallel ranks."""

    projected: int
    """Columns of the input projection."""
    inner: int
    """Columns of the input of the output projection."""
    depth: int
    """The recurrence of a token is about a matmul [inner, depth]: the tokens of a chunk, and reads and updates of the
    state. 0: none."""


def mixer_shape(arch: Architecture, mixer: str) -> MixerShape:
    """Raises ValueError for a mixer without a cost model."""
    if mixer == "mamba2" and (two := arch.mamba2) is not None:
        inner = two.num_heads * two.head_dim
        projected = 2 * inner + 2 * two.num_groups * two.state_size + two.num_heads
        return MixerShape(projected, inner, 128 + 2 * two.state_size)
    if mixer == "mamba" and (mamba := arch.mamba) is not None:
        return MixerShape(2 * mamba.inner_size, mamba.inner_size, 2 * (mamba.time_step_rank + mamba.state_size))
    if mixer == "short_convolution":
        return MixerShape(3 * arch.hidden_size, arch.hidden_size, 0)
    if (delta := arch.delta_net) is not None:
        decays = delta.num_value_heads if mixer == "gated_delta_net" or delta.low_rank_gates else delta.key_width
        projected = 2 * delta.key_width + 2 * delta.value_width + delta.num_value_heads + decays
        return MixerShape(projected, delta.value_width, 2 * 64 + 3 * delta.key_head_dim)
    raise ValueError(f"the time of {mixer} is not known")
