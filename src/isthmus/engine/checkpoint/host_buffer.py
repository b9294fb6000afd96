"""Host memory for a copy of the state, which a checkpoint is written from while training continues."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from torch import Tensor

from isthmus.engine.host_copies import host_memory

Entries: TypeAlias = dict[str, list[ShardedBase]]
_ALIGNMENT = 64


class HostBuffer:
    """Reused by all saves of a rank. Page-locked if the state is on a GPU, so that the copies run at full speed."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()

    def copied(self, state: Entries) -> Entries:
        """``state`` with its tensors copied into this buffer; they are valid until the next call."""
        tensors = [entry.data for entries in state.values() for entry in entries if isinstance(entry, ShardedTensor)]
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if (needed := sum(_padded(tensor.nbytes) for tensor in tensors)) > self.num_bytes:
            self._memory = host_memory(needed, page_locked=device is not None)
        memory, start = self._memory.numpy(), 0

        def copy(entry: Any) -> Any:
            nonlocal start
            if not isinstance(entry, ShardedTensor):
                return entry
            source: Tensor = entry.data.detach()
            if not source.numel():
                return replace(entry, data=source.cpu())
            # A storage of its own, since torch.save writes whole storages.
            target = torch.frombuffer(memory, dtype=source.dtype, count=source.numel(), offset=start)
            start += _padded(source.nbytes)
            return replace(entry, data=target.view(source.shape).copy_(source, non_blocking=True))

        copies = {key: [copy(entry) for entry in entries] for key, entries in state.items()}
        if device is not None:
            torch.cuda.synchronize(device)
        return copies


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
