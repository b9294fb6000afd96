"""What a trace records: kernels by operator, synchronizations with their place in the source, and memory."""

from __future__ import annotations

import traceback
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter

_OWN = ("/isthmus/", "/megatron/")


@dataclass(frozen=True, slots=True)
class Sync:
    kind: str
    """``read``: the host waits for values; ``to host`` and ``to device``: a copy that blocks the host; ``wait``: the
    host waits for a stream, an event or the device."""
    operator: str
    where: str
    """``file:line < file:line``, the innermost two frames of Isthmus and Megatron-Core; empty in torch's backward."""

    def __str__(self) -> str:
        return f"{self.kind} ({self.operator}) at {self.where}"


class Observer:
    """What :class:`fake_cuda.fake_tensors.FakeGpuMode` calls after each operator with GPU tensors."""

    def kernel(self, operator: str) -> None: ...

    def sync(self, kind: str, operator: str) -> None: ...

    def made(self, results: Any) -> None: ...


_OBSERVERS: list[Observer] = []


def tell(method: str, *details: Any) -> None:
    for observer in _OBSERVERS:
        getattr(observer, method)(*details)


@contextmanager
def silence() -> Iterator[None]:
    """Operators of the block are not recorded."""
    observers = _OBSERVERS[:]
    _OBSERVERS.clear()
    try:
        yield
    finally:
        _OBSERVERS[:] = observers


@contextmanager
def record() -> Iterator[Trace]:
    """Kernels and synchronizations of the block."""
    yield from _observe(Trace())


@contextmanager
def measure() -> Iterator[GpuMemory]:
    """Memory that the block allocates."""
    yield from _observe(GpuMemory())


def _observe(observer: Any) -> Iterator[Any]:
    _OBSERVERS.append(observer)
    try:
        yield observer
    finally:
        _OBSERVERS.remove(observer)


@dataclass
class Trace(Observer):
    kernels: Counter[str] = field(default_factory=Counter)
    """Operators that start at least one kernel on the GPU, without views; a fused operator counts once."""
    syncs: list[Sync] = field(default_factory=list)

    @property
    def num_kernels(self) -> int:
        return self.kernels.total()

    def syncs_in(self, *files: str) -> list[str]:
        """Those whose innermost frame is in one of these files; without names all."""
        return [str(sync) for sync in self.syncs if not files or sync.where.startswith(files)]

    def kernel(self, name: str) -> None:
        self.kernels[name] += 1

    def sync(self, kind: str, operator: str) -> None:
        self.syncs.append(Sync(kind, operator, _where()))


def _where() -> str:
    frames = [frame for frame in traceback.extract_stack() if any(part in frame.filename for part in _OWN)]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[::-1][:2])


class GpuMemory(Observer):
    """Bytes of live GPU tensors, without rounding and fragmentation of the allocator."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._change(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def made(self, results: Any) -> None:
        for tensor in tree_iter(results):
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda":
                storage = tensor.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = 0
                    self._change(storage._cdata, storage.nbytes())
                    weakref.finalize(storage, self._freed, storage._cdata)

    def _change(self, key: int, size: int) -> None:
        self.live_bytes += size - self._sizes[key]
        self._sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _freed(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)
