"""Direct preference optimization on pairs of a chosen and a rejected answer."""

from __future__ import annotations

from isthmus.data.batching.batches import PairBatches
from isthmus.engine.loss.preference_loss import PreferenceObjective
from isthmus.recipes.recipe import Recipe

RECIPE = Recipe(
    name="dpo",
    card="trained on preference pairs",
    objective=lambda config: PreferenceObjective(config.dpo),
    batches=lambda config: PairBatches,
    samples_per_sequence=2,
    bin_packs=False,
    repeats_prompts=True,
    has_reference=lambda config: config.dpo.has_reference,
)
