"""The weight update in two parts, between which the host reads the gradient norm and the overflow flag at once.

Megatron-Core's ``optimizer.step()`` reads them one after the other, and also for each optimizer of a chain.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.parallel_state import (
    get_data_parallel_group,
    get_pipeline_model_parallel_group,
    get_pipeline_model_parallel_last_rank,
)
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor
from torch.distributed.tensor import DTensor

from isthmus.engine.optim.optimizer import chain
from isthmus.engine.parallel.sharded_params import shard_group
from isthmus.engine.upstream.megatron_features import grads_for_norm

_BLOCK, _SHORT = 1024, 32 * 1024
"""Elements that are added up in float32, and those of a short tensor."""


def reduce_and_scale_grads(model: list[Any], count: Tensor | None = None, **groups: Any) -> None:
    """Megatron-Core's ``finalize_model_grads``, which reads the ``count`` that divides the gradients on the host."""
    finalize_model_grads(model, None, **groups)
    if count is None:
        return
    dist.broadcast(count, src=get_pipeline_model_parallel_last_rank(), group=get_pipeline_model_parallel_group())
    dist.all_reduce(count, group=get_data_parallel_group(with_context_parallel=True))
    for stage in model:
        stage.scale_gradients(1.0 / count.clamp(min=1))


@torch.no_grad()
def prepare_grads(optimizer: MegatronOptimizer) -> Tensor:
    """Copy the gradients to the main weights, divided by the loss scale; every rank calls it.

    Returns float64 [3] on the device, the same on all ranks: squared norm, overflow (0 or 1), loss scale.
    """
    overflow = torch.zeros_like(optimizer.get_loss_scale())
    for part in chain(optimizer):
        if getattr(part, "grad_scaler", None) is None:
            part.prepare_grads()
        else:
            overflow = torch.maximum(overflow, _unscale(part))
    by_group: dict[dist.ProcessGroup, list[Tensor]] = {}
    for part in chain(optimizer):
        by_group.setdefault(part.get_grad_stats_parallel_group(), []).extend(grads_for_norm(part))
    squares = [_squared_norm(grads, group, overflow) for group, grads in by_group.items()]
    return torch.cat([torch.stack(squares).sum(0), overflow.double(), optimizer.get_loss_scale().double()])


@torch.no_grad()
def update_weights(optimizer: MegatronOptimizer, norm: float) -> None:
    """Clip the gradients, whose norm is ``norm``, and update the weights."""
    limit = optimizer.config.clip_grad
    if limit > 0 and (factor := limit / (norm + 1e-6)) < 1:
        weights = (weight for part in chain(optimizer) for weight in part.get_parameters())
        grads = [to_local_if_dtensor(weight.grad) for weight in weights if weight.grad is not None]
        if grads:  # a rank may have no part of a small model
            torch._foreach_mul_(grads, factor)
    muon = getattr(optimizer, "muon", None)
    if muon is not None:
        muon.step()
    optimizer.step_with_ready_grads()


def update_loss_scale(optimizer: MegatronOptimizer, *, overflow: bool) -> None:
    """All optimizers of a chain (dense weights, experts) have the same scale: the loss has one."""
    for part in chain(optimizer):
        if getattr(part, "grad_scaler", None) is not None:
            part.grad_scaler.update(overflow)


def _unscale(optimizer: Any) -> Tensor:
    """Overflow of an optimizer's gradients, float32 [1], on all ranks."""
    overflow: Tensor = optimizer.found_inf.zero_()
    if not optimizer.is_stub_optimizer:
        optimizer._copy_model_grads_to_main_grads()
        if grads := optimizer._collect_main_grad_data_for_unscaling():
            torch._amp_foreach_non_finite_check_and_unscale_(grads, overflow, optimizer.grad_scaler.inv_scale)
    dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=optimizer.get_grad_stats_parallel_group())
    return overflow


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Sum of the squares of all elements of float32 tensors, a float64 scalar.

    On a CPU torch adds up a tensor in eight float32 sums, whose error grows with its size: 1e-4 for 2 million elements.
    Sums of short blocks have an error of 1e-7, and take no longer. float64 takes no longer for short tensors.
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
    parts: list[Tensor] = []
    for tensor in tensors:
        parts += (tensor,) if tensor.numel() <= _SHORT else _blocks(tensor.reshape(-1))
    return torch.stack(torch._foreach_norm(parts, 2.0, torch.float64)).square().sum()


def _blocks(elements: Tensor) -> tuple[Tensor, ...]:
    """The norms of the blocks of a vector, and the elements after them: together they have its norm."""
    size = elements.numel() // _BLOCK * _BLOCK
    return torch.linalg.vector_norm(elements[:size].view(-1, _BLOCK), dim=1), elements[size:]


def _squared_norm(grads: list[Tensor], group: dist.ProcessGroup, like: Tensor) -> Tensor:
    """Over the ranks of ``group`` and of sharded gradients, float64 [1] on the device of ``like``."""
    shards = next((shard_group(grad) for grad in grads if isinstance(grad, DTensor)), None)
    total = torch.zeros_like(like, dtype=torch.float64)
    if grads:
        total += sum_of_squares([to_local_if_dtensor(grad) for grad in grads])
    for ranks in (shards, group):
        if ranks is not None:
            dist.all_reduce(total, group=ranks)
    return total
