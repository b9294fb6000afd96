"""Training of a reward model on pairs of a chosen and a rejected answer."""

from __future__ import annotations

from isthmus.data.batching.batches import PairBatches
from isthmus.engine.loss.reward_loss import RewardObjective
from isthmus.recipes.recipe import Recipe

RECIPE = Recipe(
    name="reward",
    card="trained as a reward model on preference pairs",
    objective=lambda config: RewardObjective(config.reward),
    batches=lambda config: PairBatches,
    samples_per_sequence=2,
    bin_packs=False,
    repeats_prompts=True,
    trains_scores=True,
)
