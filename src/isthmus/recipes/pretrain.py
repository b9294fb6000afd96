"""Pretraining on documents, from random or given weights."""

from __future__ import annotations

from isthmus.engine.loss.objective import NEXT_TOKEN, NextTokenAccuracy
from isthmus.recipes.recipe import Recipe

RECIPE = Recipe(
    name="pretrain",
    card="trained on text",
    objective=lambda config: NEXT_TOKEN,
    eval_objective=NextTokenAccuracy,
    trains_mtp=True,
)
