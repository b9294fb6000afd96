"""Experts that are drawn in training, and the gradient of the draw: SparseMixer (arXiv 2409.12136).

An expert is drawn from the softmax of the scores, by the largest sum of a score and Gumbel noise. The gradient is that
of Heun's third-order method: an expert that is not the best one has, in three of four cases, a third of its weight in
the forward pass. Gradients are those of whole weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.layers.dropout import EXPERTS, gumbel_noise, token_keys
from isthmus.families.blocks.feed_forward import Experts

_WHOLE, _THIRD = 1.0, 0.3333
"""Factors of weights; the second is the number of the published code."""
_QUARTER = -math.log(-math.log(0.75))
"""One in four Gumbel numbers is above it."""


@dataclass(frozen=True, slots=True)
class ExpertDraws:
    """Noise of each choice."""

    gumbel: Tensor
    """[T, K, E + 1]: of each expert, and one number for the factor of the weight."""

    def chosen(self, scores: Tensor, number: int) -> Tensor:
        """The expert of the choice ``number``, int64 [T, 1]; ``scores`` are [T, E]."""
        return (scores + self.gumbel[:, number, :-1]).argmax(-1, keepdim=True)

    def scaled(self, weight: Tensor, scores: Tensor, index: Tensor, number: int) -> Tensor:
        """``weight`` [T, 1] of the experts ``index`` times its factor, with the gradient of ``weight``."""
        whole = (index == scores.argmax(-1, keepdim=True)) | (self.gumbel[:, number, -1:] > _QUARTER)
        return weight + weight.detach() * (torch.where(whole, _WHOLE, _THIRD) - 1).to(weight.dtype)


def draw_experts(hidden: Tensor, batch: PackedBatch, moe: Experts, layer: int) -> ExpertDraws:
    """The draws of this rank's tokens ``hidden`` [T, H]; those of a token are the same in every layout."""
    keys = token_keys(hidden, batch, layer=layer, place=EXPERTS)
    noise = gumbel_noise(keys, 0, moe.top_k * (moe.num_experts + 1))
    return ExpertDraws(noise.float().unflatten(-1, (moe.top_k, -1)))
