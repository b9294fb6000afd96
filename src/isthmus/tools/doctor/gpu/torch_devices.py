"""What torch sees when it is imported: devices, their architecture and precisions, and whether they compute."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from isthmus.errors import UsageError
from isthmus.platforms.base import RunShape
from isthmus.platforms.environment import remarks_on
from isthmus.tools.doctor.findings import Finding, error, ok, warning
from isthmus.tools.doctor.gpu.gpus import find_gpus
from isthmus.tools.doctor.gpu.torch_build import installed_torch
from isthmus.tools.doctor.machine import Machine

if TYPE_CHECKING:
    from isthmus.platforms.base import Platform

_VENDORS = {"ROCm": "AMD", "CUDA": "NVIDIA"}


def check_devices(machine: Machine) -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as failure:
        yield error(
            "torch",
            f"import torch fails: {' '.join(str(failure).split())[:300]}",
            "A library of its GPU software is missing or of another version: install torch again, and unset "
            "LD_LIBRARY_PATH if it names another CUDA or ROCm.",
            "import torch",
        )
        return
    from isthmus.platforms.detect import detect

    build = installed_torch()
    kind = build.kind if build else "CPU"
    present = any(gpu.vendor == _VENDORS.get(kind) for gpu in find_gpus(machine))
    if present and not torch.cuda.is_available():
        yield error(
            "torch",
            f"no {kind} GPUs are available to torch: {_reason(torch)}",
            "Look at the lines about driver, device files and visible GPUs. After these are right, rocminfo (AMD) or "
            "nvidia-smi (NVIDIA) has to list the GPUs in the same container. 'System not yet initialized' on a machine "
            "with NVSwitch: start nvidia-fabricmanager.",
            "torch.cuda.is_available",
        )
        return
    try:
        platform = detect()
    except UsageError as failure:
        yield error("torch", str(failure), "Correct it, or set platform=cpu.", "isthmus.platforms.detect")
        return
    yield ok("torch", f"platform {platform.name}: {platform.reason}; {platform.describe()}", "isthmus.platforms.detect")
    if platform.device_type == "cuda":
        yield from _computing(torch)
    yield from _precisions(platform)
    yield from _changed_defaults(platform, machine)


def _changed_defaults(platform: Platform, machine: Machine) -> Iterator[Finding]:
    """Variables that a run would set to another value, unless a remark on them exists."""
    for name, (value, reason) in platform.env_defaults.items():
        current = machine.environment.get(name, value)
        if current != value and not remarks_on({name: current}, RunShape(), on_gpu=True):
            yield warning("variables", f"{name}={current}, and {value} is better: {reason}", f"Unset {name}.", name)


def _reason(torch: Any) -> str:
    try:
        torch.cuda.init()
    except Exception as failure:  # of the driver
        return " ".join(str(failure).split())[:300]
    return f"it counts {torch.cuda.device_count()}"


def _computing(torch: Any) -> Iterator[Finding]:
    """A matmul on each GPU against the CPU; kernels for its architecture; access of GPUs to each other."""
    count, right, archs = torch.cuda.device_count(), 0, torch.cuda.get_arch_list()
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=random) for _ in range(2))
    expected = a @ b
    for index in range(count):
        arch = _arch(torch.cuda.get_device_properties(index))
        if archs and not _has_kernels(arch, archs):
            yield error(
                "torch",
                f"GPU {index} is {arch}, and torch has kernels for {', '.join(archs)}",
                "Install a build of torch for this GPU: a newer one, or of AMD or NVIDIA themselves. Consumer GPUs of "
                "AMD may run with HSA_OVERRIDE_GFX_VERSION set to the nearest architecture (10.3.0, 11.0.0).",
                "torch.cuda.get_arch_list",
            )
            continue
        try:
            wrong = float((a.to(f"cuda:{index}") @ b.to(f"cuda:{index}")).cpu().sub(expected).abs().max())
        except RuntimeError as failure:
            wrong, text = float("nan"), f"fails: {' '.join(str(failure).split())[:300]}"
        else:
            text = f"is wrong by {wrong:.2g}"
        if wrong < 1.0:  # also with TF32; elements are about 16
            right += 1
        else:
            yield error(
                "torch",
                f"a matmul on GPU {index} ({arch}) {text}",
                "If its memory is used, end that process. Otherwise reset the GPU or reboot, and look at dmesg.",
                f"matmul on cuda:{index}",
            )
    if right:
        yield ok("torch", f"{right} of {count} GPUs compute a matmul as the CPU does", "matmul on each GPU")
    alone = [n for n in range(1, count) if not torch.cuda.can_device_access_peer(0, n)]
    if alone:
        yield warning(
            "torch",
            f"GPU 0 has no direct access to GPUs {', '.join(map(str, alone))}: they communicate through host memory",
            "On data center GPUs this is an error of fabric manager (NVIDIA), of XGMI, or of an IOMMU without iommu=pt "
            "(AMD). Consumer GPUs may have none: prefer pipeline to tensor parallelism.",
            "torch.cuda.can_device_access_peer",
        )


def _arch(properties: Any) -> str:
    name = getattr(properties, "gcnArchName", "").partition(":")[0]
    return name or f"sm_{properties.major}{properties.minor}"


def _has_kernels(arch: str, built: list[str]) -> bool:
    """CUDA: a binary of the same major version, or code for an older one that the driver compiles (``compute_80``)."""
    if not arch.startswith("sm_"):
        return arch in built
    version = int(arch[3:])
    kinds = [match for name in built if (match := re.fullmatch(r"(sm|compute)_(\d+)[af]?", name))]
    return any(
        int(kind[2]) <= version and (kind[1] == "compute" or int(kind[2]) // 10 == version // 10) for kind in kinds
    )


def _precisions(platform: Platform) -> Iterator[Finding]:
    source = f"isthmus.platforms.{platform.name}"
    answers = {name: platform.supports(name) for name in ("bf16", "fp16", "fp8")}
    chosen, _ = platform.default_precision()
    texts = "; ".join(f"{name}: {reason if yes else f'no, {reason}'}" for name, (yes, reason) in answers.items())
    if platform.device_type == "cuda" and not answers["bf16"][0]:
        yield warning(
            "precision",
            texts,
            "Use train.precision=fp16, which scales the loss, or fp32." if answers["fp16"][0] else "Use fp32.",
            source,
        )
    else:
        yield ok("precision", f"{texts}. The default is {chosen}", source)
    if platform.device_type == "cuda":
        peak = platform.peak_tflops("bf16")
        known = f"{peak:,.0f} TFLOP/s in bf16" if peak else "unknown, so runs report TFLOP/s without MFU"
        yield ok("precision", f"peak of the device: {known}", "isthmus.platforms.parts")
