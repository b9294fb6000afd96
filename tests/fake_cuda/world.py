"""Any rank of any layout in one process, with Isthmus's own set-up code on torch's fake process group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fake_cuda import regions


def world(rank: int = 0, size: int = 1, **parallel: Any) -> Any:
    """Be ``rank`` of ``size`` ranks with the layout ``parallel`` (``tp=8, pp=16``); returns the Position.

    Collectives return at once. All ranks of a gather of objects have those of this rank.
    """
    from isthmus.config.schema import ParallelConfig
    from isthmus.engine.parallel.process_groups import open_groups
    from isthmus.platforms.detect import detect

    _join(rank, size)
    return open_groups(ParallelConfig(**parallel), detect(), seed=1)


def _join(rank: int, size: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    module: Any = dist
    create = dist.distributed_c10d.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        return create(*args, **kwargs | {"backend": "fake", "pg_options": None})

    def all_gather_object(objects: list[Any], value: Any, group: Any = None) -> None:
        objects[:] = [value] * len(objects)

    module.new_group = new_group
    module.all_gather_object = all_gather_object


class EmptyWeights:
    """A model folder whose tensors are never filled: memory that nothing touches costs nothing."""

    def __init__(self, family: Any, arch: Any, _seed: int, dtype: torch.dtype = torch.bfloat16) -> None:
        from isthmus.convert.weight_source import TensorSpec

        self.tensors = {name: TensorSpec(dtype, shape) for name, shape in family.hf_shapes(arch).items()}

    def read(self, name: str, index: Any = None, *, into: Any = None) -> Any:
        part = torch.empty(self.tensors[name].shape, dtype=self.tensors[name].dtype)[index or ...]
        return part if into is None else into.detach().copy_(part)


@dataclass
class Rank:
    config: Any
    model: Any
    stepper: Any

    def batch(self, *lengths: int) -> Any:
        """A packed sequence; all tokens count in the loss."""
        from isthmus.data.batching.packed_batch import PackedBatch

        return PackedBatch.for_training([torch.arange(length + 1) % 50 for length in lengths])


def build(
    model: dict[str, Any] | str, *, rank: int = 0, size: int = 1, precision: str = "bf16",
    sections: dict[str, dict[str, Any]] | None = None, **parallel: Any,
) -> Rank:  # fmt: skip
    """Build ``rank`` of ``size`` as a recipe does: model, wrapper, optimizer, schedule. Weights have no values."""
    from isthmus.config.schema import RunConfig
    from isthmus.engine.optim.learning_rate import build_schedule
    from isthmus.engine.optim.optimizer import build_optimizer
    from isthmus.engine.step import Stepper
    from isthmus.platforms.detect import detect
    from isthmus.recipes.model import rank_model
    from isthmus.recipes.plan.model_plan import open_run_model, plan_model

    _join(rank, size)
    rank_model.RandomWeights = EmptyWeights  # type: ignore[misc, assignment]
    regions.install()
    described = {"path": model} if isinstance(model, str) else {"config": model}
    values: dict[str, Any] = {
        "recipe": "pretrain", "out": "unused", "model": described | {"init": "random"},
        "data": {"files": ["unused"], "seq_length": 64}, "train": {"steps": 10, "precision": precision},
        "parallel": parallel,
    }  # fmt: skip
    for name, section in (sections or {}).items():
        values[name] = values.get(name, {}) | section
    config = RunConfig.model_validate(values)
    plan = plan_model(open_run_model(config), config, world_size=size)
    built = rank_model.join_and_build(config, plan, detect(), precision)
    optimizer = build_optimizer(built.stages, config.optim, config.train, family=built.plan.family)
    return Rank(config, built, Stepper(built.stages, optimizer, build_schedule(optimizer, config.optim, 10)))
