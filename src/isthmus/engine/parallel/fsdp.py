"""Fully sharded data parallelism with PyTorch's ``fully_shard``.

``docs/decisions/0015-fsdp.md`` explains why Megatron-Core 0.16's wrapper is not usable.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

_MESHES = itertools.count()


class FullyShardedDataParallel(_BaseDataParallel):
    """A decoder with parameters sharded by rows; layers compute in its dtype.

    With HSDP (``parallel.fsdp`` is a number) the data-parallel ranks have several copies of it, each sharded over
    neighbouring ranks.

    Those that the optimizer updates are float32, frozen ones have the dtype of the decoder. Its modules with an
    attribute ``fsdp_unit`` are sharded as units: ``layer``; ``float32`` if it computes in float32 in any precision;
    ``embedding``, whose backward pass needs no weights; ``output``, whose backward pass follows its forward pass.
    """

    def __init__(self, model: MegatronModule, *, reduces_each_micro_batch: bool = True) -> None:
        """``model`` was built with :func:`isthmus.engine.parallel.sharded_params.init_empty_weights`.

        Without ``reduces_each_micro_batch`` the last one of a step reduces the gradients of all.
        """
        super().__init__(config=model.config, module=model)
        self._reduces_each_micro_batch = reduces_each_micro_batch
        self.ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.sharded_tensors: dict[str, Any] = model.sharded_state_dict(
            metadata={"singleton_local_shards": False, "dp_cp_group": group}
        )
        """Megatron-Core's checkpoint entry of each full tensor, without data."""
        for entry in self.sharded_tensors.values():
            entry.data = entry.data.detach() if isinstance(entry.data, Tensor) else entry.data
        marks = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
        model._apply(lambda tensor: tensor.float() if tensor.is_meta and tensor.requires_grad else tensor)
        device = model.config.device
        _shard(model, _mesh(device.type), model.config.params_dtype)
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        for name, parameter in model.named_parameters():
            for mark, value in marks[name].items():
                setattr(parameter, mark, value)
        model.config.no_sync_func = self.no_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all micro batches but the last: each sums its gradients within a copy, the last one between copies."""
        module = self.module
        reduce = module.set_requires_all_reduce if self._reduces_each_micro_batch else module.set_requires_gradient_sync
        reduce(False)
        try:
            yield
        finally:
            reduce(True)

    def zero_grad_buffer(self) -> None:
        """Discard the sums of a step that ended before its last micro batch; the optimizer clears the gradients."""
        for unit in _sharded_modules(self.module):
            group: Any = unit._get_fsdp_state()._fsdp_param_group
            if group is None:
                continue
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            # Without a backward pass nothing else frees what is outside of the layers.
            for unit in (self.module, *_units(self.module, "output")):
                unit.reshard()
        return output

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """No-op: the backward pass of each micro batch reduces gradients."""

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        grads = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        torch._foreach_mul_([grad.to_local() for grad in grads if isinstance(grad, DTensor)], scaling_factor)


def _mesh(device_type: str) -> DeviceMesh:
    """The data-parallel ranks; with HSDP a row for each copy of the model.

    DTensor caches results by mesh and treats meshes over the same ranks as equal. A unique name prevents a second model
    in this process from using the groups of an earlier one.
    """
    name = f"dp{next(_MESHES)}"
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    shards = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    if shards.size() == group.size():
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=(name,))
    return DeviceMesh.from_group(
        [parallel_state.get_inter_distributed_optimizer_instance_group(), shards],
        device_type,
        mesh=torch.tensor(dist.get_process_group_ranks(group)).view(-1, shards.size()),
        mesh_dim_names=(f"{name}_copies", f"{name}_shards"),
    )


def _shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard each unit, then the other parameters as one more unit, which stays gathered for a micro batch."""
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    if policy.param_dtype is not None:
        for module in _units(model, "float32"):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for module in _units(model, "layer"):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in _units(model, "embedding"):
        fully_shard(module, mesh=mesh, mp_policy=policy).set_unshard_in_backward(False)
    for module in _units(model, "output"):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for unit in _sharded_modules(model):
        # The loss is a sum over tokens, divided once by their number, so gradients are summed and not averaged.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction


def _sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _units(model: nn.Module, kind: str) -> list[Any]:
    return [module for module in model.modules() if getattr(module, "fsdp_unit", None) == kind]
