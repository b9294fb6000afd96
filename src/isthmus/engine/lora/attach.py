"""Adapters of the linear layers of a decoder, before it is wrapped for data parallelism, and their values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, get_args

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from isthmus.engine.linear.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from isthmus.engine.lora.adapter import Adapter, AdapterSet, Role
from isthmus.engine.lora.exchange import Exchange
from isthmus.engine.lora.input_dropout import use_batch
from isthmus.engine.lora.low_rank import AdapterTensor, LowRank
from isthmus.engine.parallel.ddp import mark_expert_parameter
from isthmus.engine.parallel.live_parameters import live_parameters
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Placement
from isthmus.families.rules.shard import Layout, tensor_slices

AdapterSource: TypeAlias = Callable[[Adapter, Role], Tensor | None]
"""A whole tensor of an adapter; None for a magnitude that is the norm of the rows of the weight."""


def attach_adapters(
    stages: Sequence[Any],
    adapters: AdapterSet,
    placements: Mapping[str, Placement],
    arch: Architecture,
    layout: Layout,
) -> None:
    """Add the adapters of the layers of this rank, without values.

    Raises:
        UsageError: a layer cannot have adapters.
    """
    for decoder in stages:
        decoder.adapters = adapters
        decoder.config.adapter_dropout = adapters.dropout
        for layer in decoder.decoder.layers if adapters.dropout else ():
            layer.register_forward_pre_hook(use_batch, with_kwargs=True)
        inputs = getattr(getattr(decoder, "embedding", None), "layer_inputs", None)
        if adapters.dropout and inputs is not None:
            inputs.register_forward_pre_hook(use_batch, with_kwargs=True)
        layers = {id(getattr(module, "weight", None)): module for module in decoder.modules()}
        for name, weight in live_parameters(decoder).items():
            if name not in adapters.by_weight:
                continue
            layer, placed = layers.get(id(weight)), placements[name]
            pieces = tensor_slices(placed.rule, arch, layout, placed.expert)
            weight_adapters = adapters.by_weight[name]
            if (exchange := _exchange(layer)) is None:
                raise UsageError(
                    f"lora.targets: {weight_adapters[0].linear.module} cannot have an adapter here. "
                    "Name the targets without it."
                )
            low_rank = LowRank(weight_adapters, pieces, weight, exchange, dora=adapters.dora, dropout=adapters.dropout)
            layer.lora = low_rank  # type: ignore[union-attr]
            if not getattr(weight, "allreduce", True):
                for tensor in low_rank.tensors():
                    mark_expert_parameter(tensor.parameter, exchange.group, replicated=tensor.replicated)
        if adapters.lr_ratio != 1:
            _set_learning_rates(decoder, adapters.lr_ratio)


def _set_learning_rates(decoder: nn.Module, ratio: float) -> None:
    """LoRA+, with the parameter groups of PEFT; :mod:`isthmus.engine.optim.param_groups` reads the attribute."""
    faster = [tensor.parameter for tensor in adapter_tensors([decoder]) if tensor.role == "lora_B"]
    for parameter in [
        *faster,
        *(parameter for parameter in decoder.parameters() if parameter.requires_grad and parameter.dim() == 1),
    ]:
        parameter.lr_multiplier = ratio  # type: ignore[attr-defined]


def _exchange(layer: nn.Module | None) -> Exchange | None:
    if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and layer.is_expert:
        # GroupedExperts does not communicate between A and B.
        return Exchange("column" if isinstance(layer, ColumnParallelLinear) else "row", layer.tp_group)
    if isinstance(layer, ReplicatedLinear):
        group = parallel_state.get_tensor_model_parallel_group()
        sequence_parallel = getattr(layer.weight, "sequence_parallel", False)
        return Exchange("replicated", group, sequence_parallel)
    if isinstance(layer, ColumnParallelLinear):
        parallel = layer.config.sequence_parallel  # also of a layer whose input is gathered before
        return Exchange("column", layer.tp_group, parallel, sums_input_grad=not layer.disable_grad_reduce)
    if isinstance(layer, RowParallelLinear):
        return Exchange("row", layer.tp_group, layer.sequence_parallel)
    return None


def adapted_layers(model: Sequence[Any]) -> Iterator[tuple[nn.Module, LowRank]]:
    """This rank's linear layers with adapters; ``model`` are its stages, wrapped or not."""
    for stage in model:
        for module in stage.modules():
            if isinstance(found := module._modules.get("lora"), LowRank):
                yield module, found


def adapter_tensors(model: Sequence[Any]) -> Iterator[AdapterTensor]:
    """This rank's tensors of all adapters."""
    for _, low_rank in adapted_layers(model):
        yield from low_rank.tensors()


class Merge:
    """Merges adapters into the weights, one at a time, without changing them."""

    def __init__(self, model: Sequence[Any]) -> None:
        """``model`` are the stages of this rank, wrapped or not."""
        names = {id(weight): name for stage in model for name, weight in live_parameters(stage).items()}
        self._adapters = {names[id(layer.weight)]: low_rank for layer, low_rank in adapted_layers(model)}

    def __call__(self, name: str, weight: Tensor) -> Tensor:
        """This rank's part of a tensor by canonical name: float32 if it has adapters.

        Every tensor-parallel rank calls it for the same tensors in the same order.
        """
        return self._adapters[name].merged(weight) if name in self._adapters else weight


@torch.no_grad()
def load_adapters(model: Sequence[Any], source: AdapterSource) -> None:
    """Set the adapters; a collective over tp. The weights of the layers have their values, and keep them."""
    for layer, low_rank in adapted_layers(model):
        tensors = {
            role: [parameter for parameter in low_rank.tensors() if parameter.role == role] for role in get_args(Role)
        }
        _copy([*tensors["lora_A"], *tensors["lora_B"]], source)
        if low_rank.dora:
            low_rank.reset_magnitudes(layer.weight)  # type: ignore[arg-type]
            _copy(tensors["lora_magnitude_vector"], source)


@torch.no_grad()
def subtract_adapters(model: Sequence[Any]) -> None:
    """Subtract ``scale * B @ A`` from the weights, so that the model computes what it did without adapters."""
    for layer, low_rank in adapted_layers(model):
        weight: Tensor = layer.weight  # type: ignore[assignment]
        weight.copy_(weight.float() - low_rank.joined_b().float() @ low_rank.joined_a().float())


def _copy(tensors: Sequence[AdapterTensor], source: AdapterSource) -> None:
    for tensor in tensors:
        if (full_value := source(tensor.adapter, tensor.role)) is not None:
            for index, local in tensor.pieces:
                tensor.parameter[local].copy_(full_value[index])


class InitialAdapters:
    """The initial values of PEFT. A tensor depends only on the seed and its name, not on the layout."""

    def __init__(self, init: str, seed: int) -> None:
        """``init`` is ``kaiming`` or ``gaussian``."""
        self.init = init
        self.seed = seed

    def __call__(self, adapter: Adapter, role: Role) -> Tensor | None:
        if role == "lora_magnitude_vector":
            return None
        values = torch.zeros(adapter.shape(role))
        if role == "lora_B":
            return values
        digest = hashlib.sha256(f"{self.seed}:{adapter.linear.module}:{adapter.linear.expert}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
        if self.init == "gaussian":
            return values.normal_(0.0, 1 / adapter.rank, generator=generator)
        # Kaiming's bound for a = sqrt(5), torch's for a linear layer.
        bound = adapter.linear.inputs**-0.5
        return values.uniform_(-bound, bound, generator=generator)
