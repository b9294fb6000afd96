"""The recipes as the command line and the settings know them; :mod:`isthmus.recipes` has what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

RecipeName = Literal["sft", "dpo", "kto", "reward", "distill", "grpo", "pretrain"]


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Defaults of ``optim.lr`` and ``optim.warmup_fraction``."""

    lr: float
    warmup_fraction: float
    source: str
    """Where these values are used, for the log."""


_FULL = LearningRate(2e-5, 0.03, "as in Stanford Alpaca; also the default of TRL")
_SMALL = LearningRate(1e-3, 0.1, "as in SmolLM2-135M and 360M of the alignment-handbook")
_ADAPTERS = LearningRate(2e-4, 0.03, "as in QLoRA (arXiv 2305.14314), ten times the one of full fine-tuning")
_ALIGNMENT = LearningRate(5e-7, 0.1, "as in Zephyr-7B of the alignment-handbook")
_ALIGNMENT_ADAPTERS = LearningRate(5e-6, 0.1, "as in Zephyr-7B (QLoRA) of the alignment-handbook")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeSettings:
    """Which settings a recipe has. A section of its name, such as ``dpo``, belongs to it alone."""

    short_help: str
    """Line in the list of verbs."""
    help: str
    """Description in the help of the verb."""
    records: Literal["text", "chat", "preference", "unpaired", "prompt"] = "chat"
    """Kind of the records that it trains on, of :mod:`isthmus.data.tokenize.record_kinds`."""
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
    sections: tuple[str, ...] = ()
    """Further sections that belong to it alone."""
    required: tuple[str, ...] = ()
    """Settings without a default, ``section.setting``."""
    full: LearningRate = _FULL
    """For the training of all weights."""
    adapters: LearningRate = _ADAPTERS
    from_scratch: LearningRate | None = None
    """For random weights; None: ``full``."""
    small: LearningRate | None = None
    """What ``isthmus init`` proposes for all weights of a small model; None: ``full``."""

    @property
    def takes_documents(self) -> bool:
        """Whether it trains on every token of texts: has the settings of documents, and none of chats."""
        return self.records == "text"

    def learning_rate(self, *, adapters: bool, random_weights: bool) -> LearningRate:
        """The default learning rate of a run with or without adapters."""
        if adapters:
            return self.adapters
        return self.from_scratch if random_weights and self.from_scratch is not None else self.full


RECIPE_SETTINGS: Mapping[RecipeName, RecipeSettings] = {
    "sft": RecipeSettings(
        short_help="Fine-tune a model on chats.",
        help="Fine-tune a model on chats. The loss is on the assistant's answers.",
        splits_chats=True,
        smooths_labels=True,
        small=_SMALL,
    ),
    "dpo": RecipeSettings(
        short_help="Train a model on preference pairs.",
        help="Train a model on preference pairs (chosen and rejected answers) with direct preference optimization.",
        records="preference",
        answers="preference pairs",
        packed="pairs",
        full=_ALIGNMENT,
        adapters=_ALIGNMENT_ADAPTERS,
    ),
    "kto": RecipeSettings(
        short_help="Train a model on answers with labels.",
        help="Train a model on answers that are labelled as desirable or not, or on preference pairs.",
        records="unpaired",
        answers="answers with labels",
        packed="answers by length",
        full=LearningRate(1e-6, 0.1, "the default of TRL and the most that it recommends for kto.beta=0.1"),
        adapters=LearningRate(5e-6, 0.1, "the upper end of the range that TRL recommends"),
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
        records="preference",
        answers="preference pairs",
        packed="pairs",
        generates=False,
        full=LearningRate(1e-5, 0.03, "as in the example of TRL for reward models"),
        adapters=LearningRate(1e-4, 0.03, "as in the example of TRL for reward models with adapters"),
    ),
    "grpo": RecipeSettings(
        short_help="Train a model on rewards of its own answers.",
        help="Train a model on rewards of its own answers to prompts, with GRPO and its relatives.",
        records="prompt",
        answers="prompts with what their rewards need",
        packed="answers by length",
        sections=("rollout",),
        required=("rollout.reward",),
        full=LearningRate(1e-6, 0.0, "the default of TRL for GRPO"),
        adapters=LearningRate(1e-5, 0.0, "ten times the one of full fine-tuning, as TRL recommends for adapters"),
    ),
    "pretrain": RecipeSettings(
        short_help="Train a model on text.",
        help="Train a model on text. The loss is on every token.",
        records="text",
        smooths_labels=True,
        full=LearningRate(2e-5, 0.01, "that of fine-tuning, so that trained weights keep what they have learned"),
        adapters=LearningRate(2e-4, 0.01, "as in QLoRA (arXiv 2305.14314), ten times the one of full fine-tuning"),
        from_scratch=LearningRate(3e-4, 0.01, "as in Llama 2 7B; the warm-up is that of Megatron-LM's examples"),
    ),
}
"""The recipes in the order of the command line."""
