"""The ends of a model: embedding and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class Embedding:
    prefix: ClassVar[str] = ""

    position: Literal["rope", "learned", "none"] = "rope"
    position_offset: int = 0
    """Rows of the table of learned positions before that of position 0."""
    embedding_norm: bool = False
    """A norm of the embeddings, before the first layer."""
    embedding_multiplier: float = 1.0
    layer_input_size: int = 0
    """Width of a token's vector for each layer, from a table and a projection of its embedding, which the layer gates
    and adds to its output (Gemma 3n); 0: none."""


@dataclass(frozen=True, kw_only=True)
class Head:
    prefix: ClassVar[str] = ""

    tie_embeddings: bool = False
    score_head: bool = False
    """A reward model: one score, a product of the hidden state and the only row of ``output_layer.weight``, in place of
    logits. Multiplier and soft cap of logits do not apply."""
    output_bias: bool = False
    """The output layer has a bias, which a reward model does not have."""
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None
