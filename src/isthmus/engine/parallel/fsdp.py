"""Fully sharded data parallelism: each rank keeps a part of every weight, its gradient and its optimizer state.

The weights of a layer are gathered when the layer runs and let go behind it; their gradients are summed and dealt out
as soon as a micro batch has them. PyTorch's ``fully_shard`` does this. Megatron-Core 0.16 has a wrapper around it
(``TorchFullyShardedDataParallel``) that cannot be used here: see ``docs/decisions/0015-fsdp.md``.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from isthmus.engine.megatron_model import Decoder, build_model
from isthmus.engine.meta_init import without_memory
from isthmus.engine.moe.router import Router
from isthmus.families.architecture import Architecture

_MESHES = itertools.count()


class FullyShardedDataParallel(_BaseDataParallel):
    """A decoder whose parameters are float32 and sharded by rows; a layer computes in the decoder's own dtype.

    It stands where Megatron-Core's ``DistributedDataParallel`` does. There is no second copy of the weights: the
    optimizer updates the float32 rows, and what is gathered is rounded to the dtype of the arithmetic on the way.
    """

    def __init__(self, model: Decoder) -> None:
        """Shard ``model``, which was built :func:`without_memory`; its rows get memory here and nothing in it."""
        super().__init__(config=model.config, module=model)
        self.ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.described: dict[str, Any] = model.sharded_state_dict(
            metadata={"singleton_local_shards": False, "dp_cp_group": group}
        )
        """How a checkpoint keeps each tensor, from Megatron-Core; told of whole tensors that have no memory."""
        for entry in self.described.values():
            entry.data = entry.data.detach() if isinstance(entry.data, Tensor) else entry.data
        marks = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
        model._apply(lambda tensor: tensor.float() if tensor.is_meta else tensor)
        device = torch.device(torch.cuda.current_device())
        # DTensor remembers what an operation yields, the mesh included, and takes one over the same ranks for the same:
        # a name of its own keeps a second model in this process from an earlier one's groups.
        mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=(f"dp{next(_MESHES)}",))
        _shard(model, mesh, model.config.params_dtype)
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        for name, parameter in model.named_parameters():
            for mark, value in marks[name].items():
                setattr(parameter, mark, value)

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """The decoder's forward pass."""
        output: Tensor = self.module(*inputs, **named)
        if not torch.is_grad_enabled():
            # With no backward pass to come, nothing else lets go of the embedding and the projection.
            self.module.reshard()
        return output

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Nothing is left to do: gradients were summed over the ranks in the backward pass of each micro batch."""

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply this rank's part of all gradients."""
        grads = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        torch._foreach_mul_([grad.to_local() for grad in grads if isinstance(grad, DTensor)], scaling_factor)


def build_sharded(architecture: Architecture, config: TransformerConfig) -> FullyShardedDataParallel:
    """The decoder with memory for this rank's rows of each parameter and nothing in it; it is never whole."""
    with without_memory():
        model = build_model(architecture, config)
    return FullyShardedDataParallel(model)


def _shard(model: Decoder, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Cut each layer's parameters, and then the decoder's others, which are gathered together.

    The embedding and the projection may be one tensor, and the decoder uses both outside of their modules: they are
    the root's own.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    if policy.param_dtype is not None:
        for module in _of(model, Router):  # it computes in float32 whatever the layer does
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for module in _of(model, TransformerLayer):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in _of(model, FSDPModule):
        # The loss is a sum over tokens, divided once by their number: gradients are summed, not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction


def _of(model: nn.Module, kind: type) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]
