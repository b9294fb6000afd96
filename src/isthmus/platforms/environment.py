"""Sets environment variables of the platform, and warns about variables that have no effect or harm the run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from isthmus.platforms.base import Platform, RunShape

# detect may set variables before the run does; the run still reports them.
_set_here: dict[str, str] = {}


def apply_env(platform: Platform, run: RunShape | None = None) -> dict[str, tuple[str, str]]:
    """Set the platform's variables, except those that the user has set under any of their names, even to "".

    ``run=None`` sets only the variables that do not depend on the run. Returns value and reason of every variable that
    this process has set.
    """
    applied: dict[str, tuple[str, str]] = {}
    defaults = {**platform.env_defaults, **(platform.env_of_run(run) if run is not None else {})}
    for variable, (value, why) in defaults.items():
        names = (variable, *platform.env_aliases.get(variable, ()))
        if all(name not in os.environ for name in names):
            os.environ[variable] = _set_here[variable] = value
        if _set_here.get(variable) == value == os.environ.get(variable):
            applied[variable] = (value, why)
    return applied


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
        "HSA_ENABLE_SDMA", "copies then use compute units instead of the copy engines: a workaround for some "
        "consumer cards, slower on Instinct. Unset it",
        lambda value, run: value == "0",
    ),
    EnvRemark("RCCL_MSCCL_ENABLE|RCCL_MSCCLPP_\\w+", _MSCCL),
    EnvRemark(
        "NCCL_IB_DISABLE", "nodes then communicate over TCP instead of InfiniBand or RoCE, many times slower. Unset it",
        lambda value, run: value == "1",
    ),
    EnvRemark(
        "NCCL_DEBUG", "every rank logs its connections at length, for debugging. WARN is enough otherwise",
        lambda value, run: value.upper() in ("INFO", "TRACE"),
    ),
    EnvRemark("NCCL_CHECKS_DISABLE", "an old name: pointers are not checked unless NCCL_CHECK_POINTERS=1"),
    EnvRemark("NCCL_PROTO", "the library chooses a protocol for each size; one for all sizes is slower for some"),
    EnvRemark("MIOPEN_\\w+", _CONVOLUTION),
    EnvRemark("TE_HIPBLASLT_\\w+", f"{_TE}; train.gemm_tuning=true tunes torch's matmuls"),
    EnvRemark("NVTE_\\w+", _TE),
    EnvRemark("PRIMUS_TURBO_\\w+", "Primus reads it, and is not used here"),
    EnvRemark(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "parallel.fsdp gathers weights during the computation, which one queue serializes. Unset it",
        lambda value, run: value == "1" and run.fsdp,
        on_gpu=True,
    ),
    EnvRemark(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "the overlap of tensor and context parallelism relies on 1. Unset it",
        lambda value, run: value != "1" and run.tp_or_cp and not run.fsdp,
        on_gpu=True,
    ),
)  # fmt: skip


def remarks_on(environment: Mapping[str, str], run: RunShape, *, on_gpu: bool) -> list[str]:
    """Warnings about variables that are set and have no effect or harm this run."""
    found = []
    for name in sorted(environment):
        for remark in REMARKS:
            applies = (on_gpu or not remark.on_gpu) and remark.applies(environment[name], run)
            if applies and re.fullmatch(remark.names, name):
                found.append(f"{name}={environment[name]} is set: {remark.text}")
    masks = [name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if environment.get(name)]
    if len(masks) == 2:
        pairs = " and ".join(f"{name}={environment[name]}" for name in masks)
        found.append(f"{pairs} are set: on ROCm both select devices. Keep CUDA_VISIBLE_DEVICES only")
    return found
