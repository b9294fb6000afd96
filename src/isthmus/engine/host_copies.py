"""Copies between host and GPU that do not block the host. On a CPU they do nothing."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor; pinned memory makes the copy to a GPU asynchronous."""
    if device.type != "cuda":
        return tensor.to(device)
    if not tensor.numel():  # has no memory to pin
        return torch.empty_like(tensor, device=device)
    return tensor.pin_memory().to(device, non_blocking=True)


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
