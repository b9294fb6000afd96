"""The global batch size of a run that gives none: smaller for few records, so that the run has enough steps."""

from __future__ import annotations

import math

from isthmus.config.schema import RunConfig
from isthmus.recipes.registry import recipe_of

ENOUGH_STEPS = 20
"""Steps below which a run hardly changes a model."""


def default_batch_size(config: RunConfig, sequences: float, dp: int) -> int:
    """``train.global_batch_size``, halved until the epochs have enough steps if it is not given.

    A batch that also estimates a KL divergence, or has groups of answers, is not made smaller.
    """
    train, size = config.train, config.train.global_batch_size
    if "global_batch_size" in train.model_fields_set or train.steps is not None:
        return size
    recipe = recipe_of(config)
    if recipe.has_extra_forward(config) or recipe.generates_answers:
        return size
    parallel = config.parallel
    least = train.micro_batch_size * dp * (parallel.pp if parallel.vpp > 1 else 1)
    while size % (2 * least) == 0 and total_steps(config, sequences, size) < ENOUGH_STEPS:
        size //= 2
    return size


def total_steps(config: RunConfig, sequences: float, batch_size: int) -> int:
    """Steps of the run with so many sequences per epoch."""
    return config.train.steps or math.ceil((config.train.epochs or 1) * math.ceil(sequences / batch_size))


def with_batch_size(config: RunConfig, size: int) -> RunConfig:
    """The config with this ``train.global_batch_size``, as if it was given."""
    return config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": size})})
