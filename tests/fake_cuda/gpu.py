"""``torch.cuda`` of a machine with one GPU, for a process with the guard preloaded.

Only what describes the device or has no effect without one is replaced: properties, streams, events, random state.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fake_cuda import kernels
from fake_cuda.trace import tell


@dataclass(frozen=True)
class Gpu:
    name: str
    arch: str
    """``sm_90``, or on ROCm ``gfx942``."""
    memory_gib: int
    processors: int

    @property
    def is_rocm(self) -> bool:
        return self.arch.startswith("gfx")

    def properties(self) -> SimpleNamespace:
        major, minor = (9, 4 if self.arch == "gfx942" else 5) if self.is_rocm else divmod(int(self.arch[3:]), 10)
        arch = {"gcnArchName": f"{self.arch}:sramecc+:xnack-"} if self.is_rocm else {}
        return SimpleNamespace(
            name=self.name, major=major, minor=minor, total_memory=self.memory_gib << 30, is_integrated=0,
            multi_processor_count=self.processors, warp_size=64 if self.is_rocm else 32, **arch,
        )  # fmt: skip


GPUS = {
    gpu.arch: gpu
    for gpu in (
        Gpu("NVIDIA A100-SXM4-80GB", "sm_80", 80, 108),
        Gpu("NVIDIA H100 80GB HBM3", "sm_90", 80, 132),
        Gpu("NVIDIA B200", "sm_100", 180, 148),
        Gpu("AMD Instinct MI300X", "gfx942", 192, 304),
        Gpu("AMD Instinct MI355X", "gfx950", 288, 256),
    )
}
VERSIONS = {"cuda": "12.8", "hip": "6.4.43482"}


class _NoStream:
    """A stream or an event: it has finished."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.cuda_stream = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        answers = {"elapsed_time": 1.0, "query": True, "record_event": self}
        return functools.partial(_answer, answers.get(name))

    def synchronize(self) -> None:
        tell("sync", "wait", "synchronize")

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_: object) -> None: ...


def install(gpu: Gpu) -> None:
    """Let torch see ``gpu``. Call it once, before code that asks for a device."""
    version: Any = torch.version
    version.cuda, version.hip = (None, VERSIONS["hip"]) if gpu.is_rocm else (VERSIONS["cuda"], None)
    cuda: Any = torch.cuda
    properties, generator = gpu.properties(), torch.Generator()
    answers = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "get_device_properties": properties, "get_device_name": gpu.name,
        "get_device_capability": (properties.major, properties.minor), "get_arch_list": [gpu.arch],
        "mem_get_info": (properties.total_memory,) * 2, "is_bf16_supported": True,
        "max_memory_reserved": 0, "max_memory_allocated": 0, "memory_reserved": 0, "memory_allocated": 0,
        "memory_stats": {}, "current_stream": _NoStream(), "default_stream": _NoStream(),
        **dict.fromkeys(("set_device", "empty_cache", "manual_seed", "manual_seed_all", "_lazy_init",
                         "reset_peak_memory_stats", "set_stream")),
    }  # fmt: skip
    for name, value in answers.items():
        setattr(cuda, name, functools.partial(_answer, value))
    cuda.synchronize = lambda *_: tell("sync", "wait", "synchronize")
    cuda._lazy_call = lambda call, **_kwargs: call()
    cuda.default_generators = (generator,)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: generator.get_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: generator.set_state(state)
    cuda.Stream = cuda.Event = torch.Stream = torch.Event = _NoStream
    cuda.stream = cuda.StreamContext = lambda _stream: contextlib.nullcontext()
    cuda.device = lambda _device: contextlib.nullcontext()
    cuda.cudart = _Runtime
    torch.Generator = _Generator  # type: ignore[misc]
    nn.Module._apply = _apply  # type: ignore[method-assign]
    Tensor.pin_memory = _pin_memory  # type: ignore[method-assign, assignment]
    Tensor.is_pinned = lambda self, *_: is_pinned(self)  # type: ignore[method-assign, assignment]
    _give_addresses()
    kernels.install()
    # torch.tensor(..., device="cuda") makes a tensor on the host and copies it with an operator that a mode sees.
    torch._C._set_only_lift_cpu_tensors(True)
    # On the calling thread, so that a stack trace in a backward pass shows what called it.
    torch.autograd.set_multithreading_enabled(False)


class _Generator(torch.Generator):
    """On the host, whatever its device."""

    def __new__(cls, _device: Any = "cpu") -> _Generator:
        return super().__new__(cls)


def _answer(value: Any, *_args: Any, **_kwargs: Any) -> Any:
    return value


_PINNED: set[int] = set()


def _pin_memory(tensor: Tensor, *_device: Any) -> Tensor:
    return mark_pinned(tensor.clone())


def mark_pinned(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    _PINNED.add(storage._cdata)
    weakref.finalize(storage, _PINNED.discard, storage._cdata)
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    address = tensor.untyped_storage().data_ptr()
    registered = any(start <= address < start + size for start, size in _REGISTERED.items())
    return registered or tensor.untyped_storage()._cdata in _PINNED


_REGISTERED: dict[int, int] = {}
"""Bytes of page-locked host memory by address."""


class _Runtime:
    """Functions of the CUDA runtime, as ``torch.cuda.cudart()``."""

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:
        _REGISTERED[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del _REGISTERED[address]
        return 0


def _apply(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """Like torch's own, with a new parameter where the device or dtype changes: ``.data =`` refuses a fake tensor."""
    for item in module.modules():
        for name, parameter in item._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():  # not detached: the function may ask for requires_grad
                moved = function(parameter).detach()
            if moved.device != parameter.device or moved.dtype != parameter.dtype:
                new = nn.Parameter(moved, requires_grad=parameter.requires_grad)
                new.__dict__.update({key: value for key, value in vars(parameter).items() if key not in vars(new)})
                item._parameters[name] = new
        for name, buffer in item._buffers.items():
            if buffer is not None:
                item._buffers[name] = function(buffer)
    return module


def _give_addresses() -> None:
    """Fake tensors have no memory; views of one storage get addresses that are as far apart as on a GPU."""
    addresses: dict[int, int] = {}
    end = [1 << 40]
    real = torch.UntypedStorage.data_ptr

    def of_storage(storage: torch.UntypedStorage) -> int:
        if storage.device.type == "cpu":
            return real(storage)
        if storage._cdata not in addresses:
            addresses[storage._cdata] = end[0]
            end[0] += (storage.nbytes() // 512 + 1) * 512
            weakref.finalize(storage, addresses.pop, storage._cdata)
        return addresses[storage._cdata]

    def of_tensor(tensor: Tensor) -> int:
        return of_storage(tensor.untyped_storage()) + tensor.storage_offset() * tensor.element_size()

    torch.UntypedStorage.data_ptr = of_storage  # type: ignore[method-assign]
    FakeTensor.tolist = lambda self: self.cpu().tolist()  # type: ignore[method-assign]  # one copy, as on a GPU
    FakeTensor.data_ptr = of_tensor  # type: ignore[method-assign]
    FakeTensor.is_meta = property(lambda self: self.fake_device.type == "meta")  # type: ignore[assignment]
