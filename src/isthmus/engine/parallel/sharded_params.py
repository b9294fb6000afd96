"""Tensors whose rows are dealt out over the data parallel ranks, as ``torch.distributed.fsdp.fully_shard`` does it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def own_rows(tensor: DTensor) -> tuple[int, int]:
    """First and last (exclusive) of the rows that this rank holds; the last ranks may hold fewer, or none."""
    rows, ranks = tensor.shape[0], tensor.device_mesh.size()
    each = -(-rows // ranks)
    start = min(rows, tensor.device_mesh.get_local_rank() * each)
    return start, min(rows, start + each)


@contextmanager
def whole_to_fill(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor to write all rows of ``tensor`` into; a sharded one keeps its own of them, and the others are let go."""
    if not isinstance(tensor, DTensor):
        yield tensor
        return
    start, end = own_rows(tensor)
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    yield whole
    tensor.to_local().copy_(whole[start:end])


def gathered(tensor: Tensor) -> Tensor:
    """All rows of ``tensor``; every rank that holds some of them has to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
