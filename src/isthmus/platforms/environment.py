"""Sets environment variables of the platform, and warns about variables that have no effect or harm the run.

torch is imported where it is used: ``isthmus doctor --quick`` reads the remarks without it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from isthmus.platforms.base import Platform, RunShape

# detect sets variables before the run reports them.
_set_here: dict[str, str] = {}
set_late: set[str] = set()
"""Variables that this process has set after their reader had started."""
MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that select devices; HIP reads all three."""
_READ_BY_NCCL = ("NCCL_", "RCCL_", "TORCH_NCCL_", "TORCH_GLOO_")
"""Prefixes of variables that are read for process groups; the GPU runtime reads others at its first use."""
_OPEN_FILES = Path("/proc/self/fd")


def apply_env(
    platform: Platform, run: RunShape | None = None, *, device_known: bool = False
) -> dict[str, tuple[str, str]]:
    """Set the platform's variables, except those that the user has set, even to "".

    Call it before the first query of the hardware. ``run=None`` leaves out the variables that depend on the run;
    ``device_known`` adds those that depend on the device, which are read for the first process group. Returns value
    and reason of every variable that this process has set; the reason includes whether it was too late.
    """
    defaults = {
        **platform.env_defaults,
        **(platform.env_of_run(run) if run is not None else {}),
        **(platform.env_of_device() if device_known else {}),
    }
    import torch.distributed as dist

    runtime_started, nccl_started = gpu_in_use(platform), dist.is_available() and dist.is_initialized()
    applied: dict[str, tuple[str, str]] = {}
    for variable, (value, why) in defaults.items():
        if variable not in os.environ:
            os.environ[variable] = _set_here[variable] = value
            if nccl_started if variable.startswith(_READ_BY_NCCL) else runtime_started:
                set_late.add(variable)
        if _set_here.get(variable) == value == os.environ.get(variable):
            late = " (too late: this process has used the GPU before; set it before the process starts)"
            applied[variable] = (value, f"{why}{late if variable in set_late else ''}")
    return applied


def gpu_in_use(platform: Platform) -> bool:
    """Whether this process has used the GPU runtime: by torch, or by another library that has opened the driver."""
    if not platform.driver_files:
        return False
    import torch

    if torch.cuda.is_initialized():
        return True
    for entry in _OPEN_FILES.glob("*"):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(entry) in platform.driver_files:
                return True
    return False


_TE = "TransformerEngine reads it, and is not used here"
_CONVOLUTION = "it tunes convolutions, which a language model does not have"
_MSCCL = "RCCL no longer has MSCCL; 0 was a workaround for old releases"


@dataclass(frozen=True, slots=True)
class EnvRemark:
    """A warning about variables that the user has set; they are never changed."""

    names: str
    """Regular expression for the whole name."""
    text: str
    applies: Callable[[str, RunShape], bool] = lambda value, run: True
    on_gpu: bool = False


REMARKS = (
    EnvRemark("PYTORCH_ROCM_DEVICE", "no program reads it; CUDA_VISIBLE_DEVICES chooses devices, also under ROCm"),
    EnvRemark("GPU_MAX_HEAP_SIZE|GPU_MAX_ALLOC_PERCENT", "OpenCL reads it, and its default is all memory; no effect"),
    EnvRemark(
        "HSA_ENABLE_SDMA",
        "copies then use compute units instead of the copy engines: a workaround for some "
        "consumer cards, slower on Instinct. Unset it",
        lambda value, run: value == "0",
    ),
    EnvRemark("RCCL_MSCCL_ENABLE|RCCL_MSCCLPP_\\w+", _MSCCL),
    EnvRemark(
        "NCCL_IB_DISABLE",
        "nodes then communicate over TCP instead of InfiniBand or RoCE, many times slower. Unset it",
        lambda value, run: value == "1",
    ),
    EnvRemark(
        "NCCL_DEBUG",
        "every rank logs its connections at length, for debugging. WARN is enough otherwise",
        lambda value, run: value.upper() in ("INFO", "TRACE"),
    ),
    EnvRemark(
        "NCCL_(P2P|SHM)_DISABLE",
        "GPUs of a machine then exchange data over slower paths: a workaround for broken machines. Unset it",
        lambda value, run: value == "1",
    ),
    EnvRemark(
        "(CUDA|HIP)_LAUNCH_BLOCKING|AMD_SERIALIZE_(KERNEL|COPY)|TORCH_DISTRIBUTED_DEBUG",
        "for debugging: the host waits for each kernel, copy or collective. Unset it",
        lambda value, run: value.upper() not in ("", "0", "OFF", "INFO"),
    ),
    EnvRemark(
        "PYTORCH_NO_(CUDA|HIP)_MEMORY_CACHING",
        "for debugging: each tensor is allocated by the driver, which waits for the GPU. Unset it",
        lambda value, run: value not in ("", "0"),
    ),
    EnvRemark("NCCL_CHECKS_DISABLE", "an old name: pointers are not checked unless NCCL_CHECK_POINTERS=1"),
    EnvRemark("NCCL_PROTO", "the library chooses a protocol for each size; one for all sizes is slower for some"),
    EnvRemark("MIOPEN_\\w+", _CONVOLUTION),
    EnvRemark("TE_HIPBLASLT_\\w+", f"{_TE}; train.gemm_tuning=true and isthmus tune tune torch's matmuls"),
    EnvRemark("NVTE_\\w+", _TE),
    EnvRemark("PRIMUS_TURBO_\\w+", "Primus reads it, and is not used here"),
    EnvRemark(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "parallel.fsdp and parallel.async_tp copy during the computation, which one queue serializes. Unset it",
        lambda value, run: value == "1" and (run.fsdp or run.async_tp),
        on_gpu=True,
    ),
    EnvRemark(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "the overlap of tensor and context parallelism relies on 1. Unset it",
        lambda value, run: value != "1" and run.tp_or_cp and not run.fsdp and not run.async_tp,
        on_gpu=True,
    ),
)


def remarks_on(environment: Mapping[str, str], run: RunShape, *, on_gpu: bool) -> list[str]:
    """Warnings about variables that are set and have no effect or harm this run."""
    remarks = []
    for name in sorted(environment):
        for remark in REMARKS:
            applies = (on_gpu or not remark.on_gpu) and remark.applies(environment[name], run)
            if applies and re.fullmatch(remark.names, name):
                remarks.append(f"{name}={environment[name]} is set: {remark.text}")
    masks = [name for name in MASKS if environment.get(name)]
    if len(masks) > 1:
        pairs = " and ".join(f"{name}={environment[name]}" for name in masks)
        remarks.append(
            f"{pairs} are set: on ROCm all of them select devices, ROCR_VISIBLE_DEVICES first, and the others count "
            "those that it leaves. Keep one of them"
        )
    return remarks
