"""Environment variables that guides recommend and that do nothing here, or harm: recognised and told, never changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from isthmus.platforms.base import RunShape

_TE = "it is read by TransformerEngine, which is not used here"
_CONVOLUTION = "it tunes convolutions, of which a language model has none"
_MSCCL = "RCCL has no MSCCL any more; 0 was meant against a fault of old releases"


@dataclass(frozen=True, slots=True)
class Known:
    """Some variables, and a word about them."""

    names: str
    """A pattern that the whole name has to match."""
    word: str
    says: Callable[[str, RunShape], bool] = lambda value, run: True
    """Of which values, and in which runs."""
    on_gpu: bool = False
    """Whether it only matters where there are GPUs."""


KNOWN = (
    Known("PYTORCH_ROCM_DEVICE", "no program reads it; CUDA_VISIBLE_DEVICES chooses devices, also under ROCm"),
    Known("GPU_MAX_HEAP_SIZE|GPU_MAX_ALLOC_PERCENT", "it is OpenCL's, where all memory is the default; no effect"),
    Known(
        "HSA_ENABLE_SDMA", "copies then take compute units instead of the copy engines: a way round faults of some "
        "consumer cards, and slower on Instinct. Unset it",
        lambda value, run: value == "0",
    ),
    Known("RCCL_MSCCL_ENABLE|RCCL_MSCCLPP_\\w+", _MSCCL),
    Known(
        "NCCL_IB_DISABLE", "machines then talk over TCP and not over InfiniBand or RoCE, many times slower. Unset it",
        lambda value, run: value == "1",
    ),
    Known(
        "NCCL_DEBUG", "every rank writes pages about its connections, to find faults in them. WARN is enough otherwise",
        lambda value, run: value.upper() in ("INFO", "TRACE"),
    ),
    Known("NCCL_CHECKS_DISABLE", "an old name: pointers are not checked unless NCCL_CHECK_POINTERS=1"),
    Known("NCCL_PROTO", "the libraries choose a protocol for each size by themselves; one for all is slower for some"),
    Known("MIOPEN_\\w+", _CONVOLUTION),
    Known("TE_HIPBLASLT_\\w+", f"{_TE}; PYTORCH_TUNABLEOP_ENABLED=1 tunes torch's products"),
    Known("NVTE_\\w+", _TE),
    Known("PRIMUS_TURBO_\\w+", "it is read by Primus, which is not used here"),
    Known(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "parallel.fsdp gathers weights beside the computation, which one queue puts in a row. Unset it",
        lambda value, run: value == "1" and run.fsdp,
        on_gpu=True,
    ),
    Known(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "the overlap of tensor and context parallelism relies on 1. Unset it",
        lambda value, run: value != "1" and run.tp_or_cp and not run.fsdp,
        on_gpu=True,
    ),
)  # fmt: skip


def remarks_on(environment: Mapping[str, str], run: RunShape, *, on_gpu: bool) -> list[str]:
    """A line for each variable that is set and does not do what its setter may think.

    Args:
        environment: the process's.
        run: what it is going to do.
        on_gpu: whether it has one.
    """
    found = []
    for name in sorted(environment):
        for known in KNOWN:
            if re.fullmatch(known.names, name) and known.says(environment[name], run) and (on_gpu or not known.on_gpu):
                found.append(f"{name}={environment[name]} is set: {known.word}")
    masks = [name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if environment.get(name)]
    if len(masks) == 2:
        pairs = " and ".join(f"{name}={environment[name]}" for name in masks)
        found.append(f"{pairs} are set: under ROCm they are two names of one choice. Keep CUDA_VISIBLE_DEVICES")
    return found
