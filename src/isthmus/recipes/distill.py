"""Distillation: a student learns the token probabilities of a teacher, on chats."""

from __future__ import annotations

from isthmus.engine.loss.objective import Distillation
from isthmus.recipes.recipe import Recipe

RECIPE = Recipe(
    name="distill",
    card="trained on chats to predict tokens as a teacher does",
    objective=lambda config: Distillation(),
    has_teacher=True,
)
