"""The shape of a decoder, in the words of Megatron-Core, with no Megatron in sight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length a model was first trained on.

    ``llama3`` divides the frequencies whose wavelength exceeds ``original_max_position_embeddings /
    low_freq_factor`` by ``factor``, keeps those below ``... / high_freq_factor`` and blends in between;
    ``linear`` divides all of them.
    """

    kind: Literal["llama3", "linear"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Everything that decides the shapes and the arithmetic of one decoder-only model."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads (``num_key_value_heads`` in Hugging Face configs)."""
    kv_channels: int
    """Width of one head (``head_dim`` in Hugging Face configs)."""
    vocab_size: int
    """Rows of the embedding, without the padding that tensor parallelism adds."""
    max_position_embeddings: int
    norm_epsilon: float
    rotary_base: float
    rope_scaling: RopeScaling | None = None
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None
    """Number of keys a query sees, itself included; None means all that precede it."""
    init_std: float = 0.02
