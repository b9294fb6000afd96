"""Copies between host and GPU that do not block the host, and memory for them. On a CPU they do nothing."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor; pinned memory makes the copy to a GPU asynchronous."""
    if device.type != "cuda":
        return tensor.to(device)
    if not tensor.numel():  # has no memory to pin
        return torch.empty_like(tensor, device=device)
    return tensor.pin_memory().to(device, non_blocking=True)


def batch_to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch with the fields that a model reads on the device; ``loss_mask`` stays on the host."""
    if device.type == "cpu":
        return batch
    return replace(
        batch,
        input_ids=to_device(batch.input_ids, device),
        position_ids=to_device(batch.position_ids, device),
        labels=None if batch.labels is None else to_device(batch.labels, device),
        shared=None if batch.shared is None else replace(batch.shared, rows=to_device(batch.shared.rows, device)),
    )


class HostCopy:
    """A copy of a small tensor to the host that starts now; only :meth:`read` waits for it."""

    def __init__(self, tensor: Tensor) -> None:
        self._values = tensor
        self._done: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def read(self) -> Tensor:
        """The values in host memory. Work that was started on the GPU after the copy is not waited for."""
        if self._done is not None:
            self._done.synchronize()
        return self._values


def host_memory(num_bytes: int, *, page_locked: bool) -> Tensor:
    """uint8 [num_bytes]; torch's own allocator of page-locked memory rounds sizes up to powers of two."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if page_locked:
        runtime: Any = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0)) == 0:
            weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
        else:  # the memory stays as it is, and the copies are slower
            _clear_last_error()
    return memory


def _clear_last_error() -> None:
    """The check after the next kernel would report the error of a call that torch did not check, and clears it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
