"""Workarounds for upstream defects, one function each.

tests/unit/engine/upstream/test_compat.py has a test for each that fails once upstream is fixed.
"""

from __future__ import annotations

import builtins
import functools
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed


def cpu_random_state() -> None:
    """megatron-core 0.16 sets the CUDA random state through ``torch.cuda._lazy_call``.

    On a CPU build this call never runs, so forking a random stream (sequence parallelism) would have no effect.
    """
    from megatron.core.tensor_parallel import random

    module: Any = random
    module._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def quiet_missing_extensions() -> None:
    """megatron-core 0.16 warns on import about each missing extension (Apex, TransformerEngine)."""
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    # megatron-core 0.16 uses collectives that torch 2.13 renamed, and saves ShardedTensors.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.")
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"Please use DTensor instead")
    warnings.filterwarnings("ignore", message=r"TypedStorage is deprecated")  # torch 2.6, saving a checkpoint
    warnings.filterwarnings("ignore", message=r".*(Apex|Transformer Engine|TransformerEngine).*")
    logging.getLogger("megatron").setLevel(logging.ERROR)


class PatchedImports(PathFinder):
    """As the first finder of sys.meta_path, runs the code of some modules in another environment.

    - megatron-core applies torch.compile on import, which loads the compiler: a fifth of a rank's import time. It is
      deferred while megatron.core is imported.
    - megatron-core imports wandb to recognize a writer: 0.5 CPU seconds a process. It is imported lazily.
    - megatron-core 0.18 and 0.19 import the Triton kernels of an option that Isthmus does not use, also where there is
      no Triton. A stand-in is imported there.
    """

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in ("megatron.core", *_TRITON_KERNELS) or (spec := super().find_spec(name, path, target)) is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_patched(module: Any) -> None:
            if name != "megatron.core":
                return execute(_without_triton(module))
            import_lazily("wandb")
            with deferred_compile():
                execute(module)

        if name == "megatron.core" or find_spec("triton") is None:
            loader.exec_module = execute_patched
        return spec


_TRITON_KERNELS = tuple(f"megatron.core.transformer.moe.{part}" for part in ("paged_stash", "ops.paged_stash"))
"""Their module in 0.18 and in 0.19."""


def _without_triton(module: Any) -> Any:
    """Only the import statements of ``module`` see the stand-in; its kernels stay plain functions."""
    triton = SimpleNamespace(jit=lambda kernel: kernel, language=SimpleNamespace(constexpr=None))

    def import_name(name: str, *args: Any, **named: Any) -> Any:
        return triton if name in ("triton", "triton.language") else builtins.__import__(name, *args, **named)

    module.__builtins__ = vars(builtins) | {"__import__": import_name}
    return module


def import_lazily(name: str) -> None:
    """Add a module to sys.modules that runs its code when one of its attributes is read.

    Unlike :class:`importlib.util.LazyLoader`, a second import does not run it.
    """
    if name in sys.modules or (spec := find_spec(name)) is None or (loader := spec.loader) is None:
        return
    module, lock, started = ModuleType(name), threading.RLock(), False

    def load(attribute: str) -> Any:
        nonlocal started
        with lock:  # another thread waits for the whole module
            if not started:
                started = True
                vars(module).update(vars(module_from_spec(spec)))
                try:
                    loader.exec_module(module)
                except BaseException:
                    sys.modules.pop(name, None)  # as after any failed import
                    raise
                if vars(module)["__getattr__"] is load:  # a module may define one
                    del vars(module)["__getattr__"]
                return getattr(module, attribute)
            if attribute in vars(module):
                return vars(module)[attribute]
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}", name=attribute, obj=module)

    # `inspect.getmodule` reads the file of all modules; a `__path__` would let parts be imported without the module.
    vars(module).update(__spec__=spec, __file__=spec.origin, __getattr__=load)
    sys.modules[name] = module


@contextmanager
def deferred_compile() -> Iterator[None]:
    """Make torch.compile, used as a plain decorator, compile on the first call."""
    torch_compile = torch.compile

    def compile_later(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = functools.cache(lambda: torch_compile(function))
        return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    module: Any = torch
    module.compile = compile_later
    try:
        yield
    finally:
        module.compile = torch_compile


def share_gloo_devices() -> None:
    """torch gives every gloo group its own devices, whose threads wake up 100 times a second.

    Megatron-Core creates about 40 groups: with devices of their own, polling costs four ranks a fifth of two cores.
    """
    c10d: Any = torch.distributed.distributed_c10d
    c10d.ProcessGroupGloo = SharedDevicesGloo


class SharedDevicesGloo(torch.distributed.ProcessGroupGloo):
    """A gloo process group on the devices that all groups of this process share."""

    def __init__(
        self, store: torch.distributed.Store, rank: int, size: int, timeout: timedelta, **settings: Any
    ) -> None:
        """``settings`` are those that newer versions of torch add: ``enable_reconfigure`` in 2.14."""
        gloo: Any = torch.distributed.ProcessGroupGloo
        options = gloo._Options()
        if not all(hasattr(options, name) for name in settings):
            # Devices of its own cost CPU time; a setting that is lost changes what the group does.
            super().__init__(store, rank, size, timeout=timeout, **settings)
            return
        options._devices, options._timeout = gloo_devices(), timeout
        for name, value in settings.items():
            setattr(options, name, value)
        super().__init__(store, rank, size, options)


def gloo_devices() -> list[Any]:
    """One for each interface that GLOO_SOCKET_IFNAME names, as torch does it."""
    # A fork shares the epoll set of its parent's devices: its sockets would be polled, and crash, in the parent.
    return _devices_of(os.getpid())


@functools.cache
def _devices_of(_process: int) -> list[Any]:
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    gloo: Any = torch.distributed.ProcessGroupGloo
    return [gloo.create_device(interface=name) for name in interfaces] or [gloo.create_default_device()]


def use_torch_adam() -> None:
    """megatron-core 0.16 takes the Adam of TransformerEngine or Apex if one is installed.

    Theirs counts steps in ``param_groups``, has no ``fused`` option, and its state differs in a checkpoint.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    chosen: Any = optimizer
    chosen.Adam, chosen.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    asked: Any = distrib_optimizer
    asked.Adam, asked.HAVE_APEX_OR_TE = torch.optim.AdamW, False
    asked.USING_TE_OPTIMIZER = asked.USING_APEX_OPTIMIZER = False
