"""The recipes by name: what each trains on, its objective, and the models that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from isthmus.config.recipes import RECIPE_SETTINGS, RecipeName
from isthmus.config.schema import RunConfig
from isthmus.data.batching.batches import AnswerBatches, PairBatches, UnpairedBatches
from isthmus.data.batching.rollout_batches import PromptBatches
from isthmus.engine.loss.kto import KtoObjective
from isthmus.engine.loss.objective import NEXT_TOKEN, Distillation, NextTokenAccuracy
from isthmus.engine.loss.policy_loss import PolicyObjective
from isthmus.engine.loss.preference_loss import PreferenceObjective
from isthmus.engine.loss.reward_loss import RewardObjective
from isthmus.recipes.recipe import Recipe


def _kto_estimates_kl(config: RunConfig) -> bool:
    """Whether the loss needs the KL divergence, a forward pass over mismatched answers."""
    return config.kto.loss == "kto"


def _grpo_has_extra_forward(config: RunConfig) -> bool:
    """Whether the reference, the policy before several updates, or the one that generated ahead has a forward pass."""
    return config.grpo.kl_weight > 0 or config.grpo.updates_per_rollout > 1 or config.rollout.ahead > 0


_RECIPES = (
    Recipe(
        name="sft",
        card="fine-tuned on chats",
        objective=lambda config: NEXT_TOKEN,
        eval_objective=NextTokenAccuracy,
        trains_mtp=True,
    ),
    Recipe(
        name="dpo",
        card="trained on preference pairs",
        objective=lambda config: PreferenceObjective(config.dpo),
        batches=lambda config: PairBatches,
        samples_per_sequence=2,
        bin_packs=False,
        repeats_prompts=True,
        has_reference=lambda config: config.dpo.has_reference,
    ),
    Recipe(
        name="kto",
        card="trained on answers with labels (KTO)",
        objective=lambda config: KtoObjective(config.kto),
        batches=lambda config: UnpairedBatches if _kto_estimates_kl(config) else AnswerBatches,
        bin_packs=False,
        has_reference=lambda config: True,
        has_extra_forward=_kto_estimates_kl,
    ),
    Recipe(
        name="distill",
        card="trained on chats to predict tokens as a teacher does",
        objective=lambda config: Distillation(),
        has_teacher=True,
    ),
    Recipe(
        name="reward",
        card="trained as a reward model on preference pairs",
        objective=lambda config: RewardObjective(config.reward),
        batches=lambda config: PairBatches,
        samples_per_sequence=2,
        bin_packs=False,
        repeats_prompts=True,
        trains_scores=True,
    ),
    Recipe(
        name="grpo",
        card="trained with reinforcement learning (GRPO) on rewards of its own answers",
        objective=lambda config: PolicyObjective(config.grpo, config.rollout),
        batches=lambda config: partial(
            PromptBatches, group_size=config.rollout.group_size, answer_tokens=config.rollout.max_new_tokens
        ),
        bin_packs=False,
        repeats_prompts=True,
        has_extra_forward=_grpo_has_extra_forward,
        generates_answers=True,
    ),
    Recipe(
        name="pretrain",
        card="trained on text",
        objective=lambda config: NEXT_TOKEN,
        eval_objective=NextTokenAccuracy,
        trains_mtp=True,
    ),
)
RECIPES: Mapping[RecipeName, Recipe] = {recipe.name: recipe for recipe in _RECIPES}
assert RECIPES.keys() == RECIPE_SETTINGS.keys()


def recipe_of(config: RunConfig) -> Recipe:
    return RECIPES[config.recipe]
