"""Runs megatron.core on a CPU by redirecting its hard-coded ``torch.cuda`` calls.

:func:`install` runs before the first megatron.core import, only on the cpu platform. It redirects:

- the device (``current_device``, ``device="cuda"`` in tensor factories, ``Tensor.cuda``) to the CPU;
- streams, events and ``synchronize`` to no-ops;
- the device's random state to the CPU generator's;
- ``Tensor.type()``, which megatron.core compares with ``torch.cuda.FloatTensor``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch.utils import _device

from isthmus.errors import UsageError

_CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "empty", "ones", "full", "arange", "rand", "randn", "randint", "as_tensor", "linspace")
_installed = False


class _NoStream:
    """A CUDA stream or event that is always complete."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return _nothing()

    def query(self) -> bool:
        return True

    def record_event(self, _event: object = None) -> _NoEvent:
        return _NoEvent()

    def elapsed_time(self, _end: object) -> float:
        return 0.0


class _NoEvent(_NoStream):
    pass


def _nothing() -> Callable[..., None]:
    """A new function each time: torch's compiler rejects one object under two names."""
    return lambda *_args, **_kwargs: None


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return build


def install() -> None:
    """A second call changes nothing; raises UsageError if this process uses a CUDA or ROCm device."""
    global _installed
    if _installed:
        return
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        raise UsageError("this process uses a GPU, so it cannot run a model on the CPU as well. Start another process.")

    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(cuda, name, _nothing())
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _nothing(), _nothing()
    cuda.Stream, cuda.Event = _NoStream, _NoEvent
    cuda.current_stream, cuda.default_stream = lambda *_: _NoStream(), lambda *_: _NoStream()
    cuda.stream = contextlib.nullcontext
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)

    # ``with torch.device(...)`` compares factories by identity and caches them on first use. It must see torch's
    # own, or models that transformers builds on the meta device get some of their tensors on the CPU.
    _device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_args, **_kwargs: self
    tensor_type = torch.Tensor.type

    def type_for_megatron(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = tensor_type(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(answer, str) and caller.startswith("megatron."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    tensor.type = type_for_megatron
    _installed = True


def report_gpu(is_megatron: Callable[[dict[str, Any]], bool]) -> None:
    """Tell modules for which ``is_megatron(globals)`` is true that there is one GPU, of compute capability 9.0."""
    cuda: Any = torch.cuda
    available, count = cuda.is_available, cuda.device_count
    cuda.is_available = lambda: is_megatron(sys._getframe(1).f_globals) or available()
    cuda.device_count = lambda: 1 if is_megatron(sys._getframe(1).f_globals) else count()
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_name = lambda *_: "CPU"
    properties = types.SimpleNamespace(major=9, minor=0, name="CPU", total_memory=1 << 36, multi_processor_count=1)
    cuda.get_device_properties = lambda *_: properties
    cuda.mem_get_info = lambda *_: (psutil.virtual_memory().available, psutil.virtual_memory().total)
