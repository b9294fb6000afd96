"""Whether answers to the same prompt share the computation of its tokens."""

from __future__ import annotations

from dataclasses import asdict

from isthmus.config.schema import RunConfig
from isthmus.errors import UsageError
from isthmus.recipes.plan.model_plan import ModelPlan
from isthmus.recipes.registry import recipe_of


def shares_prefixes(config: RunConfig, plan: ModelPlan, device_type: str) -> bool:
    """The value of ``train.share_prefixes`` in this run.

    Raises:
        UsageError: it is true, and the run cannot share.
    """
    chosen = config.train.share_prefixes
    if chosen == "auto":
        # Unmeasured on GPUs.
        return recipe_of(config).repeats_prompts and device_type == "cpu" and not _obstacle(config, plan)
    if chosen and (obstacle := _obstacle(config, plan)):
        raise UsageError(f"train.share_prefixes=true: {obstacle}. Leave it out.")
    return chosen


def _obstacle(config: RunConfig, plan: ModelPlan) -> str:
    """Why samples cannot share tokens; empty if they can."""
    moe, architecture = config.moe, plan.architecture
    rates = (*asdict(plan.dropout).values(), config.train.neftune_alpha, config.lora.enabled and config.lora.dropout)
    scalings = [kind.rotary.rope_scaling for kind in architecture.rotary_kinds if kind.rotary is not None]
    reasons = {
        f"samples of {config.recipe} do not repeat prompts": not recipe_of(config).repeats_prompts,
        "context parallelism splits samples over ranks": config.parallel.cp > 1,
        "dropout and noise differ in the copies of a token": any(rates),
        "the router of the model draws experts at random": architecture.moe is not None
        and architecture.moe.score == "sparsemixer",
        "losses of the router, the update of its bias and expert capacity count each copy of a token": bool(
            moe.losses or moe.expert_bias_update_rate or moe.capacity_factor
        ),
        "the rotary embedding of the model depends on the length of the sample": any(
            scaling is not None and scaling.kind in ("longrope", "dynamic") for scaling in scalings
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
