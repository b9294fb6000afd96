"""Workarounds for upstream defects, one function each.

tests/unit/engine/upstream/test_compat.py has a test for each that fails once upstream is fixed.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.machinery import PathFinder
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


class CompileOnFirstCall(PathFinder):
    """megatron-core 0.16 applies torch.compile on import, which loads the compiler: a fifth of a rank's import time.

    As the first finder of sys.meta_path, it defers torch.compile while megatron.core is imported.
    """

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "megatron.core" or (spec := super().find_spec(name, path, target)) is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_deferring(module: Any) -> None:
            with deferred_compile():
                execute(module)

        loader.exec_module = execute_deferring
        return spec


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

    def __init__(self, store: torch.distributed.Store, rank: int, size: int, timeout: timedelta) -> None:
        gloo: Any = torch.distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._timeout = gloo_devices(), timeout
        super().__init__(store, rank, size, options)


@functools.cache
def gloo_devices() -> list[Any]:
    """One for each interface that GLOO_SOCKET_IFNAME names, as torch does it."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    gloo: Any = torch.distributed.ProcessGroupGloo
    return [gloo.create_device(interface=name) for name in interfaces] or [gloo.create_default_device()]


def clip_in_place() -> None:
    """megatron-core 0.16 without Apex copies every gradient to clip, and synchronizes once per tensor for the norm."""
    from megatron.core.optimizer import clip_grads

    def norm(_chunk: int, _overflow: Any, lists: list[list[torch.Tensor]], *_per_tensor: bool) -> tuple[Any, None]:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))).view(1), None

    def scale(_chunk: int, _overflow: Any, lists: list[list[torch.Tensor]], factor: Any) -> None:
        torch._foreach_mul_(lists[0], factor)

    module: Any = clip_grads
    module.l2_norm_impl, module.multi_tensor_scale_impl = norm, scale


def fill_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """megatron-core 0.16: DistributedOptimizer.state_dict needs the state that AdamW creates in its first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device if group["fused"] else "cpu"),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def keep_bucket_padding(optimizer: Any) -> None:
    """megatron-core 0.16: DistributedOptimizer saves wrong state behind a padded bucket (its source: "issue #504").

    It gathers the buckets without the padding between them, but slices parameters at offsets with padding. A tied
    embedding has its own bucket, so with pp > 1 the rest of the last stage is shifted unless the embedding's size is a
    multiple of 128 (and of dp). A second call changes nothing.
    """
    gather = type(optimizer).get_parameter_state_dp_zero

    def gather_padded(**how: Any) -> Any:
        state = gather(optimizer, **how)
        for number, buffer in enumerate(optimizer.buffers if state is not None else ()):
            for tensors in state[number].values():
                for name in [name for name, value in tensors.items() if isinstance(value, torch.Tensor)]:
                    padded = torch.zeros(buffer.numel, dtype=torch.float32)
                    parts = tensors[name].split([bucket.numel_unpadded for bucket in buffer.buckets])
                    for bucket, part in zip(buffer.buckets, parts, strict=True):
                        padded[bucket.offset : bucket.offset + part.numel()] = part
                    tensors[name] = padded
        return state

    optimizer.get_parameter_state_dp_zero = gather_padded


def sync_loss_scales(optimizer: Any) -> None:
    """megatron-core 0.16: each optimizer of a chain (dense weights, experts) lowers its loss scale separately.

    The loss uses the first optimizer's scale, so the others would unscale by a wrong factor. Copy the lowest scale to
    all of them.
    """
    chain = [each.grad_scaler for each in getattr(optimizer, "chained_optimizers", ())]
    scalers = [scaler for scaler in chain if scaler is not None]
    if len(scalers) > 1:
        lowest = min(
            (scaler.state_dict() for scaler in scalers), key=lambda s: (float(s["scale"]), s["growth_tracker"])
        )
        for scaler in scalers:
            scaler.load_state_dict(lowest)


def load_adam(optimizer: Any, tensors: dict[Any, Any], *, steps: int) -> None:
    """megatron-core 0.16: DistributedOptimizer cannot load the state of torch's AdamW that it saved.

    It expects ``step`` among the sharded tensors, and gives all parameters one shared ``step`` tensor, which AdamW
    would increment once per parameter. ``tensors`` is the loaded ``param_state``. Hyperparameters stay as configured.
    """
    counts = {parameter: state.pop("step") for parameter, state in optimizer.optimizer.state.items()}
    optimizer.load_parameter_state_from_fully_reshardable(tensors)
    for parameter, count in counts.items():
        optimizer.optimizer.state[parameter]["step"] = torch.full_like(count, steps)
