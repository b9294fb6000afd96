"""Kahneman-Tversky optimization on answers with labels."""

from __future__ import annotations

from isthmus.config.schema import RunConfig
from isthmus.data.batching.batches import AnswerBatches, UnpairedBatches
from isthmus.engine.loss.kto import KtoObjective
from isthmus.recipes.recipe import Recipe


def _estimates_kl(config: RunConfig) -> bool:
    """Whether the loss needs the KL divergence, a forward pass over mismatched answers."""
    return config.kto.loss == "kto"


RECIPE = Recipe(
    name="kto",
    card="trained on answers with labels (KTO)",
    objective=lambda config: KtoObjective(config.kto),
    batches=lambda config: UnpairedBatches if _estimates_kl(config) else AnswerBatches,
    bin_packs=False,
    has_reference=lambda config: True,
    has_extra_forward=_estimates_kl,
)
