"""The model of a run and its parallel layout, known before any rank starts."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.config.schema import ParallelConfig, RunConfig
from isthmus.convert.hf.hf_weights import OpenedHfWeights, open_weights
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.families.registry import family_for
from isthmus.families.rules.shard import check_tp_size
from isthmus.hf.model_folder import ModelFolder
from isthmus.platforms import rank_env
from isthmus.recipes.setup.layout_checks import check_experts, check_layout, check_stages
from isthmus.recipes.setup.model_source import open_source


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Which model is built, from which files, in which layout."""

    source: ModelFolder
    weights: OpenedHfWeights
    family: Family
    architecture: Architecture
    parallel: ParallelConfig
    world_size: int


def plan_model(config: RunConfig, *, world_size: int | None = None) -> ModelPlan:
    """Read the model's config and check the layout against it; builds nothing.

    Args:
        config: of the run.
        world_size: number of ranks; None takes the environment's.

    Raises:
        MissingInput, DataError, UnsafeInput: the model folder is absent or damaged.
        UsageError: the family is unknown, the model cannot be trained, the weights have an unsupported quantization, or
            the layout does not fit.
    """
    source = open_source(config.model)
    family = family_for(source.config)
    weights = open_weights(source, family)
    architecture = weights.arch
    # Sizes that the model does not divide into are reported before a wrong number of ranks.
    check_tp_size(architecture, config.parallel.tp)
    check_stages(architecture, config.parallel.pp, config.parallel.vpp)
    if world_size is None:
        world_size = rank_env.world_size()
    config.parallel.check_world_size(world_size)
    check_layout(architecture, config.parallel)
    check_experts(architecture, config.moe)
    return ModelPlan(source, weights, family, architecture, config.parallel, world_size)
