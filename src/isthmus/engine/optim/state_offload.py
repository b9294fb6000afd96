"""Gradients and optimizer state that leave the GPU while a model generates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.distributed.tensor import DTensor

from isthmus.engine.host_copies import host_memory
from isthmus.engine.optim.optimizer import torch_optimizers
from isthmus.engine.trace_region import trace_region

_ALIGNMENT = 64


class StateOffload:
    """Frees the memory of gradients, moments and float32 main weights of a rank within a block.

    Storages are emptied and filled again, so that all views of them stay valid: those of buckets, shards and Muon.
    Gradients have no values between two steps. The host memory is page-locked, and kept for the next time.
    """

    def __init__(self, stages: Sequence[Any], optimizer: MegatronOptimizer) -> None:
        self._stages, self._optimizer = stages, optimizer
        self._host = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    @torch.no_grad()
    def on_host(self) -> Iterator[None]:
        """The state is in host memory within the block, where the optimizer and backward passes cannot run."""
        self._optimizer.zero_grad()  # frees gradients that are not in buffers
        gradients, state = _by_storage(self._gradients()), _by_storage(self._state())
        sizes = {key: tensor.nbytes for key, tensor in (gradients | state).items()}
        copies = self._host_copies(state)
        with trace_region("optimizer state to host memory"):
            for key, tensor in state.items():
                copies[key].copy_(tensor, non_blocking=True)
            for tensor in (*gradients.values(), *state.values()):
                tensor.untyped_storage().resize_(0)
        try:
            yield
        finally:
            with trace_region("optimizer state from host memory"):
                for key, tensor in (gradients | state).items():
                    tensor.untyped_storage().resize_(sizes[key])
                for key, tensor in state.items():
                    tensor.copy_(copies[key], non_blocking=True)

    def _gradients(self) -> Iterator[Tensor]:
        """Views of the buffers of Megatron-Core; FSDP has none."""
        for stage in self._stages:
            for parameter in stage.parameters():
                if hasattr(parameter, "main_grad"):
                    yield parameter.main_grad

    def _state(self) -> Iterator[Tensor]:
        """Tensors on the device of the weights that are not weights of the model."""
        weights = {_storage(parameter).data_ptr() for stage in self._stages for parameter in stage.parameters()}
        device = next(self._stages[0].parameters()).device
        for adam in torch_optimizers(self._optimizer):
            for group in adam.param_groups:
                for parameter in group["params"]:
                    for tensor in (parameter, *adam.state.get(parameter, {}).values()):
                        on_device = isinstance(tensor, Tensor) and tensor.dim() and tensor.device == device
                        if on_device and _storage(tensor).data_ptr() not in weights:
                            yield tensor

    def _host_copies(self, state: dict[int, Tensor]) -> dict[int, Tensor]:
        """Views of the host memory, one for each tensor."""
        ends = torch.tensor([0, *(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in state.values())]).cumsum(0)
        starts = ends.tolist()
        if starts[-1] > self._host.numel():
            on_gpu = any(tensor.is_cuda for tensor in state.values())
            self._host = host_memory(starts[-1], page_locked=on_gpu)
        return {
            key: self._host[start : start + tensor.nbytes].view(tensor.dtype)
            for start, (key, tensor) in zip(starts, state.items(), strict=False)
        }


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _by_storage(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """All elements of each storage, [n], by its address."""
    result: dict[int, Tensor] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes():
            result[storage.data_ptr()] = local.as_strided((storage.nbytes() // local.element_size(),), (1,), 0)
    return result
