"""Tasks for a world of ranks that look at how weights and gradients lie over the data parallel ranks."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch.distributed.tensor import DTensor

from isthmus.engine.megatron_model import live_tensors
from isthmus.engine.optim.optimizer import torch_optimizers
from isthmus.hf.tensors.parallel_writer import SafetensorsWriter
from isthmus.recipes.setup import rank_model
from isthmus.recipes.setup.hf_export import export_hf
from ranks.tasks import own_tokenizer, start, train
from ranks.tasks import refusal as _refusal


def shares(**layout: Any) -> list[dict[str, float]]:
    """Of each rank after a step and an evaluation: which part of all weights, gradients and moments it holds."""
    training = start(**layout)
    stepper = training.stepper
    stepper.train_step(training.batches.step(0))
    # Gradients live until the next step clears them.
    parameters = [each for stage in training.model.stages for each in stage.parameters()]
    (adam,) = torch_optimizers(stepper.optimizer)
    held = {
        "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "moments": [adam.state[parameter]["exp_avg"] for parameter in parameters if parameter in adam.state],
    }
    stepper.evaluate(training.held_out.eval_batches())
    held["weights"] = list(live_tensors(training.model.stages).values())
    mine = {name: _numel(tensors, own=True) / _numel(tensors, own=False) for name, tensors in held.items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def _numel(tensors: list[torch.Tensor], *, own: bool) -> int:
    return sum((t.to_local() if own and isinstance(t, DTensor) else t).numel() for t in tensors)


def export(*, destination: str, fail: bool = False, **layout: Any) -> None:
    """Export a model as it was read; with ``fail``, rank 0's disk is full when it comes to its third tensor."""
    model = start(**layout).model
    tokenizer = own_tokenizer(model.plan.source.path)
    write, count = SafetensorsWriter.write, 0

    def write_or_fail(self: Any, *args: Any) -> int:
        nonlocal count
        count += 1
        if fail and count == 3:
            raise OSError(errno.EIO, "the disk broke")
        return write(self, *args)

    with patch.object(SafetensorsWriter, "write", write_or_fail):
        export_hf(model, Path(destination), tokenizer, dtype=None, replace=False)


def failed_export(**settings: Any) -> dict[str, Any]:
    """What every rank is told when one cannot write; see :func:`export`."""
    with patch.dict(_refusal.__globals__, {"broken_export": export}):
        return _refusal(task="broken_export", fail=True, **settings)


def train_in_buckets(*, bucket_elements: int | None, **settings: Any) -> dict[str, Any]:
    """Train with buckets of this size, and tell how many there are and what was under way at what time.

    ``reduced_early`` and ``gathered_late`` count the buckets whose gradients were on their way before the last micro
    batch was done, and whose weights were still to be gathered when the optimizer step was done.
    """
    asked, finish = rank_model._overlap, _ParamAndGradBucketGroup.finish_grad_sync
    gather = _ParamAndGradBucketGroup.start_param_sync
    seen: dict[str, Any] = {"buckets": set(), "reduced_early": 0, "gathered_late": 0}

    def watched_finish(group: Any, **how: Any) -> None:
        seen["buckets"].add(id(group))
        seen["reduced_early"] += group.grad_reduce_handle is not None
        finish(group, **how)

    def watched_gather(group: Any, force_sync: bool = False) -> None:
        gather(group, force_sync=force_sync)
        seen["gathered_late"] += group.param_gather_handle is not None

    def in_buckets(*args: Any) -> Any:
        return asked(*args) | {"bucket_elements": bucket_elements}

    with (
        patch.object(rank_model, "_overlap", in_buckets),
        patch.object(_ParamAndGradBucketGroup, "finish_grad_sync", watched_finish),
        patch.object(_ParamAndGradBucketGroup, "start_param_sync", watched_gather),
    ):
        return train(**settings) | seen | {"buckets": len(seen["buckets"])}
