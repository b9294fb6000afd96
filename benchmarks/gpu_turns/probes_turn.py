"""The ceilings of the device, and which kernels this build of torch has for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from gpu_turns.rows import append

Check = tuple[str, Callable[[], str | None]]


def run(spec: dict[str, Any]) -> None:
    """Append a row for each measurement of ``isthmus doctor --bench`` and for each kernel."""
    from isthmus.platforms.detect import detect
    from isthmus.platforms.environment import apply_env
    from isthmus.tools.doctor import measurements

    platform = detect(spec["platform"])
    apply_env(platform)
    platform.prepare_process()
    if spec["dry"]:
        measurements.SECONDS, measurements.CPU_GEMM, measurements.CPU_ELEMENTS = 0.0, 64, 1 << 10
    for name, check in checks(platform, 0 if spec["dry"] else 8192):
        started_s = time.perf_counter()
        try:
            why = check()
        except Exception as error:  # the kernel that a run would fail in
            why = f"{type(error).__name__}: {error}"[-500:]
        append("check", name=name, works=why is None, why=why and why[:200], seconds=time.perf_counter() - started_s)
    for measured in measurements.measure_device(platform, lambda _: None):
        append("measurement", **asdict(measured))


def checks(platform: Any, tokens: int) -> Iterator[Check]:
    """Each kernel with the function that gives the reason why it cannot be used, or None.

    Attention is checked with ``tokens`` tokens; 0: with few.
    """
    import torch

    from isthmus.engine.attention.backends.registry import BACKENDS, AttentionNeeds
    from isthmus.engine.compiled import compile_failure, find_compiler
    from isthmus.engine.linear.matmul import no_float32_sums
    from isthmus.engine.moe.grouped_gemm import unsupported_reason

    device, bf16 = torch.device(platform.device_type), torch.bfloat16
    yield "weight gradients added in float32 (addmm.dtype_out)", lambda: no_float32_sums(device, bf16)
    yield "grouped GEMM", lambda: unsupported_reason((128, 128), bf16)
    yield "FP8 GEMM", lambda: None if platform.supports("fp8")[0] else platform.supports("fp8")[1]
    kind = platform.device_type
    yield "compiled regions", lambda: find_compiler(kind)[1] or compile_failure("auto", kind) or None
    needs = AttentionNeeds(device=kind, dtype=bf16, groups=8, repeat=4, key_width=128, value_width=128)
    yield "error of a failed host registration is cleared", lambda: error_of_registration(platform.device_type)
    for name in BACKENDS:
        yield f"attention {name}", partial(_attention_lacks, name, needs, tokens)


def error_of_registration(device_type: str) -> str | None:
    """Why a kernel may fail after memory that could not be page-locked; None if it does not.

    CUDA keeps the error of a failed call, and torch reports it after the next kernel, of whatever code that is. A row
    has whether it does so on this device.
    """
    import torch

    from isthmus.engine.host_copies import host_memory

    if device_type == "cpu":
        return "no GPU: memory is not page-locked"
    runtime: Any = torch.cuda.cudart()
    if (code := int(runtime.cudaHostRegister(0, 0, 0))) == 0:
        return "the registration of no memory does not fail here, so nothing was tested"
    try:
        torch.ones(1, device=device_type)
        kept = False
    except RuntimeError:
        kept = True
    append("fact", registration_error=code, error_is_kept=kept)
    host_memory(0, page_locked=True)  # is refused in the same way
    total = int(torch.ones(8, device=device_type).sum())
    return None if total == 8 else f"the sum of eight ones is {total} after it"


def _attention_lacks(name: Any, needs: Any, tokens: int) -> str | None:
    from isthmus.engine.attention.backends.registry import BACKENDS
    from isthmus.engine.attention.backends.self_check import self_check

    return BACKENDS[name].unsupported(needs) or self_check(name, needs, tokens=tokens).failure
