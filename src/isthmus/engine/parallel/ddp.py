"""Gradient reduction: data parallelism that overlaps it with computation, and reduction without a wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn


class OverlappingDataParallel(DistributedDataParallel):
    """Megatron-Core's wrapper with additional hooks for reductions and weight gathering.

    The decoder adds weight gradients directly to the buffers, and runs embedding, projection and experts without
    calling their modules, so Megatron-Core's hooks do not run for them. A module that uses weights of submodules so
    has an attribute ``uses_weights_directly``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.use_forward_hook:
            decoder = self.module
            for block in decoder.modules():
                if getattr(block, "uses_weights_directly", False):
                    block.register_forward_pre_hook(self._waits_for(block))
            if decoder.pre_process or decoder.mtp_process:
                decoder.register_forward_pre_hook(self._waits_for(decoder.embedding))
            if decoder.post_process:
                tied = decoder.share_embeddings_and_output_weights and decoder.pre_process
                decoder.decoder.register_forward_hook(
                    self._waits_for(decoder.embedding if tied else decoder.output_layer)
                )

    def _waits_for(self, module: nn.Module) -> Callable[..., None]:
        def wait(*_call: object) -> None:
            for parameter in module.parameters():
                if parameter.requires_grad:
                    self.param_to_bucket_group[parameter].finish_param_sync()

        return wait

    def _make_backward_post_hook(self, param: nn.Parameter) -> Callable[..., None]:
        mark_ready = super()._make_backward_post_hook(param)

        def hook(*grads: object) -> None:
            added: bool = getattr(param, "grad_added_to_main_grad", False)
            if self.ddp_config.overlap_grad_reduce and param.grad is None and added:
                self.param_to_bucket_group[param].register_grad_ready(param, self.force_all_reduce)
            else:
                mark_ready(*grads)

        return hook


def gather_weights(models: Iterable[Any]) -> None:
    """Finish an asynchronous weight gather after an optimizer step; every rank calls it."""
    for model in models:
        if isinstance(model, DistributedDataParallel) and model.ddp_config.overlap_param_gather:
            model.start_param_sync(force_sync=True)


@contextmanager
def weights_gathered(models: Iterable[Any]) -> Iterator[None]:
    """For forward passes between a backward pass and its update: they gather no weights, which they have.

    Else the forward pass after the update would take the weights of before it for the new ones.
    """
    buckets = [
        group
        for model in models
        if isinstance(model, DistributedDataParallel)
        for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups)
    ]
    before = [group.param_gather_dispatched for group in buckets]
    try:
        for group in buckets:
            group.param_gather_dispatched = True
        yield
    finally:
        for group, dispatched in zip(buckets, before, strict=True):
            group.param_gather_dispatched = dispatched


def mark_expert_parameter(parameter: Any, group: Any, *, replicated: bool) -> None:
    """An expert's parameter has a data-parallel group of its own; ``replicated``: all etp ranks of ``group`` have it.

    The gradient norm counts such a parameter on the first of them, whatever its tp rank is.
    """
    parameter.allreduce = False
    if replicated:
        parameter.tensor_model_parallel = group.rank() == 0
        parameter.shared = group.rank() != 0


def sum_tp_grads(model: nn.Module) -> None:
    """Sum the gradients of parameters with a copy on each tp rank in the backward pass, for a model without a wrapper.

    For a wrapped model ``finalize_model_grads`` does so after the last micro batch, with the same conditions: each rank
    has some of the heads that a QK norm is applied to, or some of the tokens.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return

    def summed(grad: Tensor) -> Tensor:
        grad = grad.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(grad, group=group)
        return grad

    config: Any = model.config
    for name, parameter in model.named_parameters():
        is_head_norm = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
        if is_head_norm or (config.sequence_parallel and getattr(parameter, "sequence_parallel", False)):
            parameter.register_hook(summed)
