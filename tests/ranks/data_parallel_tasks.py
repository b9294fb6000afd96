"""Rank tasks that check how weights and gradients are sharded over data-parallel ranks."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isthmus.engine.checkpoint import run_state, save_load
from isthmus.engine.checkpoint.checkpoint_writer import SaveOptions
from isthmus.engine.optim.optimizer import torch_optimizers
from isthmus.engine.parallel.live_parameters import live_tensors
from isthmus.hf.tensors.parallel_writer import SafetensorsWriter
from isthmus.recipes.model import rank_model
from isthmus.recipes.model.hf_export import export_hf
from ranks.live_memory import LiveMemory
from ranks.tasks import _digest, start, train
from ranks.tasks import refusal as _refusal


def shares(**layout: Any) -> list[dict[str, float]]:
    """Fraction of all weights, gradients and moments on each rank, after a step and an evaluation."""
    training = start(**layout)
    stepper = training.stepper
    stepper.train_step(training.batches.step(0))
    # The next step clears the gradients.
    parameters = [item for stage in training.model.stages for item in stage.parameters()]
    (adam,) = torch_optimizers(stepper.optimizer)
    tensors_by_kind = {
        "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "moments": [adam.state[parameter]["exp_avg"] for parameter in parameters if parameter in adam.state],
    }
    stepper.evaluate(training.valid.eval_batches())
    tensors_by_kind["weights"] = list(live_tensors(training.model.stages).values())
    mine = {
        name: _numel(tensors, local=True) / _numel(tensors, local=False) for name, tensors in tensors_by_kind.items()
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def _numel(tensors: list[torch.Tensor], *, local: bool) -> int:
    return sum((t.to_local() if local and isinstance(t, DTensor) else t).numel() for t in tensors)


class Collectives(TorchDispatchMode):
    """Numbers and bytes of collectives by operator, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(item, DTensor) for item in types):  # its own dispatch calls operators of local tensors
            return NotImplemented
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.calls.append((func._schema.name.split("::")[1], max(tensor.nbytes for tensor in tensors)))
        return func(*args, **(kwargs or {}))


def collectives(**layout: Any) -> list[tuple[str, int]]:
    """Each collective of the second step, with the bytes of its larger side."""
    training = start(**layout)
    training.stepper.train_step(training.batches.step(0))
    with Collectives() as counted:
        training.stepper.train_step(training.batches.step(1))
    return counted.calls


def abandoned_steps(**layout: Any) -> list[list[str]]:
    """Digests of the state after a step, and after an equal one of a new model that was abandoned once before it."""

    class Abandoned(Exception): ...

    def abandon(_done: int) -> None:
        raise Abandoned

    digests = []
    for abandons in (False, True):
        training = start(**layout)
        batches = training.batches.step(0)
        if abandons:
            try:
                training.stepper.train_step(batches, before_micro_batch=abandon)
            except Abandoned:
                pass
        training.stepper.train_step(batches)
        digests.append(_digest(training))
    return digests


def export(*, destination: str, fail: bool = False, **layout: Any) -> None:
    """Export a loaded model; with ``fail``, the third write of rank 0 raises an I/O error."""
    model = start(**layout).model
    write, count = SafetensorsWriter.write, 0

    def write_or_fail(self: Any, *args: Any) -> int:
        nonlocal count
        count += 1
        if fail and count == 3:
            raise OSError(errno.EIO, "the disk broke")
        return write(self, *args)

    with patch.object(SafetensorsWriter, "write", write_or_fail):
        export_hf(model, Path(destination), None, dtype=None, replace=False)


def failed_export(**settings: Any) -> dict[str, Any]:
    """The error that every rank raises if one cannot write; see :func:`export`."""
    with patch.dict(_refusal.__globals__, {"broken_export": export}):
        return _refusal(task="broken_export", fail=True, **settings)


def train_in_buckets(*, bucket_elements: int | None, **settings: Any) -> dict[str, Any]:
    """Train with buckets of this size and count overlapping communication.

    ``reduced_early`` counts buckets whose gradient reduction starts before the end of the last micro batch.
    ``gathered_late`` counts buckets whose weight gather is still running at the end of the optimizer step.
    """
    overlap, finish = rank_model._overlap, _ParamAndGradBucketGroup.finish_grad_sync
    gather = _ParamAndGradBucketGroup.start_param_sync
    counts: dict[str, Any] = {"buckets": set(), "reduced_early": 0, "gathered_late": 0}

    def count_finish(group: Any, **kwargs: Any) -> None:
        counts["buckets"].add(id(group))
        counts["reduced_early"] += group.grad_reduce_handle is not None
        finish(group, **kwargs)

    def count_gather(group: Any, force_sync: bool = False) -> None:
        gather(group, force_sync=force_sync)
        counts["gathered_late"] += group.param_gather_handle is not None

    def in_buckets(*args: Any) -> Any:
        return overlap(*args) | {"bucket_elements": bucket_elements}

    with (
        patch.object(rank_model, "_overlap", in_buckets),
        patch.object(_ParamAndGradBucketGroup, "finish_grad_sync", count_finish),
        patch.object(_ParamAndGradBucketGroup, "start_param_sync", count_gather),
    ):
        return train(**settings) | counts | {"buckets": len(counts["buckets"])}


def memory_of_checkpoints(*, root: str, **layout: Any) -> list[dict[str, int]]:
    """Of each rank, in bytes: its optimizer state, and the tensors that a save and a load allocate at most at once."""
    training = start(**layout)
    stepper, parallel = training.stepper, training.model.plan.parallel
    state = [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for adam in torch_optimizers(stepper.optimizer)
        for parameter, moments in adam.state.items()
        for tensor in (parameter, moments["exp_avg"], moments["exp_avg_sq"])
    ]
    with LiveMemory() as saving:
        progress = run_state.Progress(step=0, data="these samples")
        folder = save_load.save(Path(root), stepper, progress, parallel, SaveOptions(keep=1))
    with LiveMemory() as loading:
        save_load.load(folder, stepper, parallel)
    mine = {
        "state": sum(tensor.numel() * tensor.element_size() for tensor in state),
        "largest": max(tensor.numel() * tensor.element_size() for tensor in state),
        "saving": saving.peak_bytes,
        "loading": loading.peak_bytes,
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered
