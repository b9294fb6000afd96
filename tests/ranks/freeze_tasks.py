"""Tasks of rank pools: gradients and training with frozen tensors."""

from __future__ import annotations

import hashlib
from typing import Any

import torch.distributed as dist

from isthmus.engine.optim.optimizer import memory_stats
from isthmus.engine.parallel.live_parameters import live_parameters
from ranks.tasks import start


def gradients(**settings: Any) -> dict[str, Any]:
    """Hashes of the weight gradients of a step by ``rank name``, of data-parallel size 1, and the memory of rank 0."""
    training = start(**settings)
    stepper = training.stepper
    for stage in stepper.model:
        stage.train()
        stage.zero_grad_buffer()
    stepper._run_pipeline(training.batches.step(0), stepper.objective, forward_only=False)
    mine = {
        f"{dist.get_rank()} {name}": hashlib.sha256(parameter.main_grad.numpy().data).hexdigest()
        for name, parameter in live_parameters(training.model.stages).items()
        if parameter.requires_grad
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    hashes = {name: value for part in gathered for name, value in part.items()}
    return {"hashes": hashes, "memory": memory_stats(training.model.stages, stepper.optimizer)}
