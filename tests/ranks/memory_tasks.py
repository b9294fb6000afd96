"""A task that measures the memory of a step of all ranks, for the benchmark of the memory estimate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from isthmus.config.schema import ParallelConfig, RunConfig
from isthmus.convert.weight_source import RandomWeights
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.loss import cross_entropy_cpu
from isthmus.engine.optim.learning_rate import build_schedule
from isthmus.engine.optim.optimizer import build_optimizer
from isthmus.engine.step import Stepper
from isthmus.recipes.model import rank_model
from isthmus.recipes.plan.memory_estimate import estimate_ranks
from isthmus.recipes.plan.model_plan import open_run_model, plan_model
from ranks.live_memory import LiveMemory
from ranks.pool_worker import platform


class UncachedWeights(RandomWeights):
    """Without the last tensor, which is no part of the estimate."""

    def read(self, name: str, index: Any = None, *, into: Any = None) -> torch.Tensor:
        part = super().read(name, index, into=into)
        self._last = None
        return part


@contextmanager
def resized(live: LiveMemory) -> Iterator[None]:
    """FSDP frees gathered weights by resizing their storage."""
    resize = torch.UntypedStorage.resize_

    def counted(storage: torch.UntypedStorage, size: int) -> Any:
        live.resize(storage, size)
        return resize(storage, size)

    torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def step_memory(
    model: dict[str, Any], seq_length: int = 512, micro_batches: int = 2, precision: str = "bf16",
    sections: dict[str, Any] | None = None, **parallel: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """Of each rank: bytes of live tensors at the peak of a step, the estimate of its pipeline rank, and its parts."""
    world = dist.get_world_size()
    sections = sections or {}
    samples = sections.get("train", {}).get("micro_batch_size", 1)
    values: dict[str, Any] = {
        "recipe": "pretrain", "out": "unused", "model": {"config": model, "init": "random"},
        "data": {"files": ["unused"], "seq_length": seq_length}, "parallel": parallel,
        "train": {"steps": 10, "precision": precision},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    values["train"]["global_batch_size"] = ParallelConfig(**parallel).dp(world) * micro_batches * samples
    config = RunConfig.model_validate(values)

    def new_buffer(num_tokens: int, num_rows: int, *, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(num_tokens, num_rows)  # instead of mapped memory, which is not seen

    weights = patch.object(rank_model, "RandomWeights", UncachedWeights)
    with LiveMemory() as live, resized(live), weights, patch.object(cross_entropy_cpu, "new_buffer", new_buffer):
        built = rank_model.join_and_build(
            config, plan_model(open_run_model(config), config, world_size=world), platform(), precision
        )
        optimizer = build_optimizer(built.stages, config.optim, config.train, family=built.plan.family)
        stepper = Stepper(built.stages, optimizer, build_schedule(optimizer, config.optim, 10))
        batch = PackedBatch.for_training([torch.arange(seq_length + 1) % 50] * samples)
        stepper.train_step([batch] * micro_batches)  # makes the state of the optimizer
        live.peak_bytes = 0
        stepper.train_step([batch] * micro_batches)
    estimate = estimate_ranks(built.plan, config, precision)[built.position.pp_rank]
    mine = {"measured": live.peak_bytes, "estimated": estimate.total, "text": str(estimate)}
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, mine)
    return gathered
