"""Megatron-Core's TransformerConfig with the settings of Isthmus's modules."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from isthmus.config.schema.moe import MoeConfig

BackendName = Literal["varlen", "cudnn", "flex", "sdpa", "blocks"]
"""The attention backends in :mod:`isthmus.engine.attention.backends`."""
_CPU = torch.device("cpu")


@dataclass
class DecoderConfig(TransformerConfig):
    experts: MoeConfig = field(default_factory=MoeConfig)
    device: torch.device = _CPU
    """Device of this rank's weights and activations."""
    embedding_dropout: float = 0.0
    adapter_dropout: float = 0.0
    """Dropout rate of the inputs of adapters; 0 without any."""
    seed: int = 0
    """Seed of dropout masks and noise."""
    recomputed: frozenset[str] = frozenset()
    """``train.recompute_modules`` of selective recomputation; Megatron-Core's setting has other names."""
    attention: BackendName = "blocks"
    label_smoothing: float = 0.0
    """Label smoothing of the cross entropy in training."""
    neftune_alpha: float = 0.0
    """Size of the noise on embeddings in training."""
    samples_experts: bool = False
    """Whether the experts of a token are drawn in training."""
    vocab_rows: int | None = None
    """Rows of the embedding over all ranks; None: those of the vocabulary, padded."""

    @property
    def is_random(self) -> bool:
        """Whether a training step has dropout or noise, or draws experts."""
        rates = self.attention_dropout, self.hidden_dropout, self.embedding_dropout, self.adapter_dropout
        return self.samples_experts or max(*rates, self.neftune_alpha) > 0


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the embedding, padded to a multiple of ``tp``. The added rows are zero and never used."""
    return math.ceil(vocab_size / tp) * tp
