"""Supervised fine-tuning on chats, with loss on the assistant's messages."""

from __future__ import annotations

from isthmus.engine.loss.objective import NEXT_TOKEN, NextTokenAccuracy
from isthmus.recipes.recipe import Recipe

RECIPE = Recipe(
    name="sft",
    card="fine-tuned on chats",
    objective=lambda config: NEXT_TOKEN,
    eval_objective=NextTokenAccuracy,
    trains_mtp=True,
)
