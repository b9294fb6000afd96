"""Detects the platform."""

from __future__ import annotations

import os

import torch

from isthmus.errors import UsageError
from isthmus.platforms import rank_env
from isthmus.platforms.base import Platform, RunShape
from isthmus.platforms.cpu import CpuPlatform
from isthmus.platforms.cuda import CudaPlatform
from isthmus.platforms.environment import MASKS, apply_env
from isthmus.platforms.rocm import RocmPlatform

_TITLES = {"cuda": "CUDA", "rocm": "ROCm"}


def gpu_supports(arch: str, capability: str) -> tuple[bool, str]:
    """Whether a GPU that this machine need not have, such as ``gfx942``, supports a capability, and the reason."""
    return (RocmPlatform if arch.startswith("gfx") else CudaPlatform).arch_supports(arch, capability)


def detect(prefer: str = "auto", run: RunShape | None = None) -> Platform:
    """Choose the platform; ``auto`` takes a GPU that this torch can use, else the CPU.

    On a build for GPUs this sets the environment variables of the platform and of ``run``, because the GPU runtime
    reads them at the first device query.

    Raises:
        UsageError: the platform is not available, or this machine has fewer GPUs than ranks.
    """
    if prefer not in ("auto", "cpu", *_TITLES):
        raise UsageError(f"platform={prefer} is unknown. Use auto, cpu, cuda or rocm.")
    if prefer == "cpu":
        return CpuPlatform(reason="platform=cpu is set")
    built_for, version = _build()
    if prefer != "auto" and prefer != built_for:
        raise UsageError(_wrong_build(prefer, built_for, version))
    if built_for is None:
        return CpuPlatform(reason=f"torch {torch.__version__} is built without GPU support")
    title = f"torch {torch.__version__} is built for {_TITLES[built_for]} {version}"
    build = RocmPlatform if built_for == "rocm" else CudaPlatform
    apply_env(build(reason=title), run)
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        devices = f"{count} device{'' if count == 1 else 's'}"
        ranks = rank_env.local_world_size()
        # A batch system may show each rank only its own device. The rendezvous refuses ranks with the same one.
        single_device = count == 1 and rank_env.stop_file() is None
        if ranks > count and not single_device:
            raise UsageError(
                f"{ranks} ranks on this machine need one GPU each, and torch sees {devices}{_hidden(built_for)}. "
                f"Use --nproc {count}, or platform=cpu; under Slurm, --gpus-per-task=1 gives each task its own."
            )
        return build(reason=f"{title} and sees {devices}")
    reason = f"{title} but sees no device{_hidden(built_for)}"
    if prefer == "auto":
        return CpuPlatform(reason=reason)
    tool = "rocm-smi" if built_for == "rocm" else "nvidia-smi"
    raise UsageError(
        f"platform={prefer}: {reason}. Check whether {tool} lists one, or use platform=cpu. isthmus doctor names why."
    )


def _build() -> tuple[str | None, str | None]:
    """Platform and version that torch is built for. HIP first: a ROCm build may have a CUDA version too."""
    if torch.version.hip:
        return "rocm", torch.version.hip
    return ("cuda", torch.version.cuda) if torch.version.cuda else (None, None)


def _wrong_build(prefer: str, built_for: str | None, version: str | None) -> str:
    has = f"for {_TITLES[built_for]} {version}" if built_for else "without GPU support"
    others = f"platform={built_for}, cpu or auto" if built_for else "platform=cpu or auto"
    return (
        f"platform={prefer}, but torch {torch.__version__} is built {has}. "
        f"Use {others}, or install a {_TITLES[prefer]} build of torch."
    )


def _hidden(built_for: str) -> str:
    """The environment variables that hide devices, as text."""
    names = MASKS if built_for == "rocm" else MASKS[:1]
    masks = [f"{name}={os.environ[name]!r}" for name in names if name in os.environ]
    return f" ({', '.join(masks)} is set)" if masks else ""
