"""Parameters on the meta device, and DTensors sharded by rows with ``torch.distributed.fsdp.fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook


def local_rows(tensor: DTensor) -> tuple[int, int]:
    """This rank's rows [start, end); the last ranks may have fewer rows, or none."""
    rows, ranks = tensor.shape[0], tensor.device_mesh.size()
    per_rank = -(-rows // ranks)
    start = min(rows, tensor.device_mesh.get_local_rank() * per_rank)
    return start, min(rows, start + per_rank)


def elements_before(tensor: DTensor) -> int:
    """Number of elements in the rows of earlier ranks."""
    return local_rows(tensor)[0] * (tensor.numel() // max(1, len(tensor)))


@contextmanager
def full_to_shard(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor for all rows; on exit ``tensor`` is set from it: a sharded one from this rank's rows."""
    # isthmus.engine.linear.quantized_weight.QuantizedWeight has it.
    quantize: Callable[[Tensor], None] | None = getattr(tensor, "quantize_", None)
    if quantize is None and not isinstance(tensor, DTensor):
        yield tensor
        return
    full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    yield full
    if quantize is not None:
        quantize(full)
    elif isinstance(tensor, DTensor):
        start, end = local_rows(tensor)
        tensor.to_local().copy_(full[start:end])


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather all rows; collective over the ranks of the mesh."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_elements(tensor: Any) -> Tensor:
    """This rank's elements of a tensor or DTensor, flat; shares the memory."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().view(-1)


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Modules built in the block have parameters on the meta device; buffers are created as usual."""
    hook: Any = _to_meta  # torch's type for such hooks has no return value
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None:
        return None
    return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
