"""Which kernels a run can use on this device: attention, FP8 and grouped GEMMs, the compiler, collectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from isthmus.errors import UsageError
from isthmus.tools.doctor.findings import Finding, error, ok, warning
from isthmus.tools.doctor.machine import Machine

if TYPE_CHECKING:
    from isthmus.platforms.base import Platform

_NEXT = "With train.attention=auto, runs use the next one that is right."


def check_attention(machine: Machine) -> Iterator[Finding]:
    """Each backend against float32 with heads as those of Llama, without and with a window."""
    import torch

    from isthmus.engine.attention.backends.registry import BACKENDS, AttentionNeeds
    from isthmus.engine.attention.backends.selection import select_backend
    from isthmus.engine.attention.backends.self_check import self_check
    from isthmus.engine.kernel_check import TOLERANCE

    platform = _platform()
    on_gpu = platform.device_type == "cuda"
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[platform.default_precision()[0]]
    absent: set[str] = set()
    for window in (False, True):
        needs = AttentionNeeds(platform.device_type, dtype, 2, 4, 128, 128, window=window)
        kind = "attention with a window" if window else "attention"
        for name, backend in BACKENDS.items():
            if reason := backend.unsupported(needs):
                if name not in absent:
                    yield ok("kernels", f"attention: no {name} here, {reason}", "attention_backends")
                absent.add(name)
                continue
            result = self_check(name, needs)
            if result.failure:
                yield warning("kernels", f"{kind}: {name} is not usable, {result.failure}", _NEXT, "self_check")
            else:
                yield ok(
                    "kernels",
                    f"{kind}: {name} passes, errors {result.forward:.1g} forward and {result.backward:.1g} backward, "
                    f"at most {TOLERANCE[dtype]:g}",
                    "self_check",
                )
        chosen = select_backend("auto", needs, verified=on_gpu)
        yield ok("kernels", f"{kind}: runs use {chosen.name}", "select_backend")


def check_gemms(machine: Machine) -> Iterator[Finding]:
    """FP8 matmuls and GEMMs of experts; on a CPU there is no choice."""
    import torch

    from isthmus.engine.linear.fp8_linear import Fp8Recipe, check_kernels
    from isthmus.engine.linear.fp8_quantization import ScalingName, named_scaling, unsupported_scaling
    from isthmus.engine.moe.gemm_choice import time_gemms
    from isthmus.engine.moe.grouped_gemm import unsupported_reason

    platform = _platform()
    if platform.device_type == "cpu":
        yield ok("kernels", "experts: a loop of GEMMs, as on every CPU", "gemm_choice")
        return
    device = torch.device("cuda", platform.device_index())
    supported, reason = platform.supports("fp8")
    scalings: tuple[ScalingName, ...] = ("tensorwise", "rowwise", "blockwise", "mxfp8")
    for scaling in scalings:
        if not supported:
            yield ok("kernels", f"no FP8 matmuls, {reason}", f"isthmus.platforms.{platform.name}")
            break
        if (missing := unsupported_scaling(scaling, platform)) is not None:
            yield ok(
                "kernels", f"no FP8 matmuls with {scaling} scales, {missing}", f"isthmus.platforms.{platform.name}"
            )
            continue
        swizzled = platform.swizzled_mx_scales
        try:
            check_kernels(Fp8Recipe(named_scaling(scaling, swizzled=swizzled), *platform.fp8_types()), device)
        except UsageError as failure:
            yield warning("kernels", str(failure), "Use another train.fp8_scaling, or bf16.", "check_kernels")
        else:
            yield ok("kernels", f"FP8 matmuls with {scaling} scales are right", "check_kernels")
    if lacks := unsupported_reason((1024, 2048), torch.bfloat16):
        yield ok("kernels", f"experts: a loop of GEMMs, {lacks}", "gemm_choice")
    else:
        timings = time_gemms(8, ((2048, 1024), (1024, 1024)), 8192, device)
        yield ok("kernels", f"8 experts of 1024: {'; '.join(map(str, timings))}", "time_gemms")


def check_compiler(machine: Machine) -> Iterator[Finding]:
    from isthmus.engine.compiled import find_compiler

    platform = _platform()
    compiler, missing = find_compiler(platform.device_type)
    if platform.device_type == "cpu":
        yield ok("kernels", "compiler: not needed on a CPU", "find_compiler")
    elif missing:
        yield warning(
            "kernels",
            f"compiler: {missing}; norms, activations and rotary embeddings run as separate, slower kernels",
            "Install gcc (apt install gcc) and the Triton that belongs to this torch.",
            "find_compiler",
        )
    else:
        yield ok("kernels", f"compiler: {compiler}", "find_compiler")


def check_collectives(machine: Machine) -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    platform = _platform()
    names = {"nccl": "RCCL" if platform.name == "rocm" else "NCCL", "gloo": "gloo"}
    needed = ["gloo", *(["nccl"] if platform.device_type == "cuda" else [])]  # gloo: rendezvous and checkpoints
    present = dist.is_available() and {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    for backend in needed:
        if not present or not present[backend]:
            yield error(
                "collectives",
                f"torch is built without {names[backend]}, so several ranks cannot initialize a process group",
                "Install a build of torch with it, such as the wheels of PyTorch, or run one rank.",
                f"torch.distributed.is_{backend}_available",
            )
        elif backend == "nccl":
            version = torch.cuda.nccl.version()
            text = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
            yield ok("collectives", f"{names[backend]} {text}", "torch.cuda.nccl.version")
        else:
            yield ok("collectives", names[backend], "torch.distributed.is_gloo_available")


def _platform() -> Platform:
    from isthmus.platforms.detect import detect

    try:
        return detect()
    except UsageError:  # check_devices reports it
        return detect("cpu")
