"""Deterministic training: two runs of the same command give the same bits, also if one of them was resumed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from isthmus.errors import UsageError
from isthmus.platforms import environment
from isthmus.platforms.base import EnvDefaults, Platform

_NCCL = {"NCCL_ALGO": ("Ring", "train.deterministic: NVLink SHARP adds in an order that differs from run to run")}
CUDA_DEFAULTS: EnvDefaults = _NCCL | {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", "train.deterministic: cuBLAS then does not share workspaces of streams"),
}
ROCM_DEFAULTS: EnvDefaults = _NCCL | {
    "ROCBLAS_DEFAULT_ATOMICS_MODE": ("0", "train.deterministic: GEMMs then add without atomics"),
}
_ACCEPTED = {
    "NCCL_ALGO": ("Ring", "Tree"),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "ROCBLAS_DEFAULT_ATOMICS_MODE": ("0",),
}


def use_deterministic_algorithms(platform: Platform) -> str:
    """Let torch use deterministic kernels, and raise an error where it has none; returns a line for the log.

    Call it after :func:`isthmus.platforms.environment.apply_env`. Code that has to choose asks
    ``torch.are_deterministic_algorithms_enabled()``.

    Raises:
        UsageError: a variable has another value, or was set after this process had used the GPU.
    """
    if platform.device_type == "cpu":
        return "train.deterministic=true changes nothing: runs on a CPU are deterministic"
    for name, values in _ACCEPTED.items():
        if os.environ.get(name, values[0]) not in values:
            raise UsageError(
                f"train.deterministic=true needs {name}={' or '.join(values)}, got {os.environ[name]}. Unset it."
            )
    if late := environment.set_late & _ACCEPTED.keys():
        needed = " ".join(f"{name}={os.environ[name]}" for name in sorted(late))
        raise UsageError(
            f"train.deterministic=true: this process used the GPU before {needed} could be set. Set it before the "
            "process starts."
        )
    torch.use_deterministic_algorithms(True)
    # The default, for debugging, writes each new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return "deterministic: torch uses deterministic kernels, and raises an error where it has none"


@contextmanager
def restored_algorithms() -> Iterator[None]:
    """Restore torch's settings after a run, for the program that started it."""
    settings = torch.utils.deterministic
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if torch.are_deterministic_algorithms_enabled() != enabled:  # the call imports the compiler
            torch.use_deterministic_algorithms(enabled, warn_only=warns)
        settings.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
