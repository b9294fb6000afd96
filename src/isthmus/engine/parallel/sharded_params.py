"""Parameters on the meta device, and DTensors sharded by rows with ``torch.distributed.fsdp.fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

Item = TypeVar("Item")
BUCKET_BYTES = 1 << 28
"""Bytes of the tensors in one collective: a link of 400 GB/s needs 0.7 ms for them, many times what it takes to start
one. The memory for them is twice as much."""


def shard_group(tensor: DTensor) -> torch.distributed.ProcessGroup:
    """The ranks that have the rows of a copy: the last dimension of the mesh."""
    return tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)


def copy_number(tensor: DTensor) -> int:
    """Which of the copies of the tensor this rank has rows of; 0 if there is one."""
    mesh = tensor.device_mesh
    return 0 if mesh.ndim == 1 else mesh.get_local_rank(0)


def local_rows(tensor: DTensor) -> tuple[int, int]:
    """This rank's rows [start, end); the last ranks may have fewer rows, or none."""
    rows, group = tensor.shape[0], shard_group(tensor)
    per_rank = -(-rows // group.size())
    start = min(rows, group.rank() * per_rank)
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
    """Gather all rows; collective over the ranks of a copy."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_tensors(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """As :func:`full_tensor` of each tensor in turn, with one all-gather for all sharded ones of a bucket."""
    for bucket in buckets(tensors, lambda tensor: tensor.numel() * tensor.dtype.itemsize):
        gathered = iter(_gathered([tensor for tensor in bucket if isinstance(tensor, DTensor)]))
        for tensor in bucket:
            yield next(gathered) if isinstance(tensor, DTensor) else tensor


def buckets(items: Iterable[Item], num_bytes: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Groups of consecutive items of at most ``BUCKET_BYTES`` together, or of one item."""
    bucket: list[Item] = []
    size = 0
    for item in items:
        item_bytes = num_bytes(item)
        if bucket and size + item_bytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += item_bytes
    if bucket:
        yield bucket


def _gathered(tensors: list[DTensor]) -> list[Tensor]:
    """All rows of tensors that are sharded over the same ranks."""
    if not tensors:
        return []
    group = shard_group(tensors[0])
    ranks, parts, sizes = group.size(), [], []
    for tensor in tensors:  # every rank has as many bytes: the rows of the first one
        size = -(-len(tensor) // ranks) * (tensor.numel() // max(1, len(tensor))) * tensor.dtype.itemsize
        local = tensor.to_local().contiguous().view(-1).view(torch.uint8)
        parts += [local, local.new_zeros(size - local.numel())]
        sizes.append(size)
    local = torch.cat(parts)
    result = local.new_empty(ranks, local.numel())
    torch.distributed.all_gather_into_tensor(result.view(-1), local, group=group)
    return [
        rows.reshape(-1).view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
        for tensor, rows in zip(tensors, result.split(sizes, dim=1), strict=True)
    ]


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
