"""The model of a run and its parallel layout, before any rank starts."""

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
    source: ModelFolder
    weights: OpenedHfWeights
    family: Family
    architecture: Architecture
    parallel: ParallelConfig
    world_size: int


def plan_model(config: RunConfig, *, world_size: int | None = None) -> ModelPlan:
    """Read the config of the model and check the layout; ``world_size`` None is that of the environment.

    Raises:
        MissingInput, DataError, UnsafeInput: the model folder is missing or damaged.
        UsageError: the model, its quantization or the layout is not supported.
    """
    source = open_source(config.model)
    family = family_for(source.config)
    weights = open_weights(source, family)
    architecture = weights.arch
    # Report sizes that do not divide the model before a wrong number of ranks.
    check_tp_size(architecture, config.parallel.tp)
    check_stages(architecture, config.parallel.pp, config.parallel.vpp)
    if world_size is None:
        world_size = rank_env.world_size()
    config.parallel.check_world_size(world_size)
    check_layout(architecture, config.parallel)
    check_experts(architecture, config.moe)
    return ModelPlan(source, weights, family, architecture, config.parallel, world_size)
