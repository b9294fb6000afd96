"""The recipes as the command line and the settings know them; :mod:`isthmus.recipes` has what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

RecipeName = Literal["sft", "dpo", "kto", "reward", "distill", "pretrain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeSettings:
    """Which settings a recipe has. A section of its name, such as ``dpo``, belongs to it alone."""

    short_help: str
    """Line in the list of verbs."""
    help: str
    """Description in the help of the verb."""
    takes_documents: bool = False
    """Trains on every token of texts: has the settings of documents, and none of chats."""
    answers: str | None = None
    """Trains on answers to prompts: the records, which mock data cannot make; None: it trains on single samples."""
    packed: str = "answers"
    """How answers share a packed sequence."""
    splits_chats: bool = False
    """A chat may become several samples."""
    smooths_labels: bool = False
    """Its loss is the cross entropy of ``train.label_smoothing``."""
    generates: bool = True
    """Trains a language model, which can answer ``eval.prompts``."""
    required: tuple[str, ...] = ()
    """Settings without a default, ``section.setting``."""


RECIPE_SETTINGS: Mapping[RecipeName, RecipeSettings] = {
    "sft": RecipeSettings(
        short_help="Fine-tune a model on chats.",
        help="Fine-tune a model on chats. The loss is on the assistant's answers.",
        splits_chats=True,
        smooths_labels=True,
    ),
    "dpo": RecipeSettings(
        short_help="Train a model on preference pairs.",
        help="Train a model on preference pairs (chosen and rejected answers) with direct preference optimization.",
        answers="preference pairs",
        packed="pairs",
    ),
    "kto": RecipeSettings(
        short_help="Train a model on answers with labels.",
        help="Train a model on answers that are labelled as desirable or not, or on preference pairs.",
        answers="answers with labels",
        packed="answers by length",
    ),
    "distill": RecipeSettings(
        short_help="Train a model on the probabilities of a teacher.",
        help="Train a model on chats to predict tokens as a teacher does: distill.teacher, a model of any family.",
        splits_chats=True,
        required=("distill.teacher",),
    ),
    "reward": RecipeSettings(
        short_help="Train a reward model on preference pairs.",
        help="Train a reward model on preference pairs (chosen and rejected answers).",
        answers="preference pairs",
        packed="pairs",
        generates=False,
    ),
    "pretrain": RecipeSettings(
        short_help="Train a model on text.",
        help="Train a model on text. The loss is on every token.",
        takes_documents=True,
        smooths_labels=True,
    ),
}
"""The recipes in the order of the command line."""
