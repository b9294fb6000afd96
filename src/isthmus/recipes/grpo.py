"""Reinforcement learning on rewards of the model's own answers, with GRPO and its relatives."""

from __future__ import annotations

from functools import partial

from isthmus.config.schema import RunConfig
from isthmus.data.batching.rollout_batches import PromptBatches
from isthmus.engine.loss.policy_loss import PolicyObjective
from isthmus.recipes.recipe import Recipe


def _has_extra_forward(config: RunConfig) -> bool:
    """Whether the reference, the policy before several updates, or the one that generated ahead has a forward pass."""
    return config.grpo.kl_weight > 0 or config.grpo.updates_per_rollout > 1 or config.rollout.ahead > 0


RECIPE = Recipe(
    name="grpo",
    card="trained with reinforcement learning (GRPO) on rewards of its own answers",
    objective=lambda config: PolicyObjective(config.grpo, config.rollout),
    batches=lambda config: partial(
        PromptBatches, group_size=config.rollout.group_size, answer_tokens=config.rollout.max_new_tokens
    ),
    bin_packs=False,
    repeats_prompts=True,
    has_extra_forward=_has_extra_forward,
    generates_answers=True,
)
