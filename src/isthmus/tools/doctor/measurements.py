"""Measures what training uses of a device: GEMMs, memory, copies to the host and collectives between local ranks."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from isthmus.platforms import rank_env
from isthmus.platforms.base import Platform
from isthmus.platforms.gpu import GpuPlatform
from isthmus.platforms.parts import Part

CPU_GEMM, CPU_ELEMENTS, COPY_BYTES = 2048, 1 << 26, 256 << 20
SECONDS = 1.0
"""Time for the repetitions of a measurement."""
ALL_REDUCE_SECONDS = 40.0
"""Until the ranks of the all-reduce are stopped: starting them takes most of it."""
PEAK_SHARE = {"fp32": 0.7, "bf16": 0.7, "fp8": 0.6, "memory": 0.8, "host": 0.8, "links": 0.7}
"""Share of a data sheet's figure that can be reached where no measurement of the part is published. GEMMs: of the
published ones in ``isthmus.platforms.parts``, the median in bf16 and in FP8."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measurement:
    name: str
    """Such as ``GEMM bf16``."""
    value: float
    unit: Literal["TFLOP/s", "GB/s"]
    reachable: float | None
    """None: no figure is known for this device."""
    basis: str
    """Where ``reachable`` comes from, or why it is unknown."""
    what: str
    """How it was measured."""


def measure_device(platform: Platform, report: Report) -> Iterator[Measurement]:
    """All but the collective, on the device of this process, in about 10 s; sizes fit a GPU with 8 GiB.

    A single process also measures a GEMM on each other GPU.
    """
    part = platform.part() if isinstance(platform, GpuPlatform) else None
    device = torch.device("cpu") if platform.device_type == "cpu" else torch.device("cuda", platform.device_index())
    for precision in ("fp32", "bf16", "fp8"):
        if platform.supports(precision)[0]:
            report(f"GEMM {precision}")
            yield _gemm(precision, platform, device, part)
    report("memory bandwidth")
    yield _memory(device, part)
    if device.type == "cpu":
        return
    report("copies between host and device")
    yield from _copies(device, part)
    others = range(1, platform.device_count() or 1) if rank_env.local_world_size() == 1 else ()
    for index in others:
        report(f"GEMM bf16 on GPU {index}")
        measured = _gemm("bf16", platform, torch.device("cuda", index), part)
        yield replace(measured, name=f"{measured.name} on GPU {index}")


def _gemm(precision: str, platform: Platform, device: torch.device, part: Part | None) -> Measurement:
    size = CPU_GEMM if device.type == "cpu" else 8192 if precision != "fp32" else 4096
    run = _fp8_gemm(size, platform, device) if precision == "fp8" else _plain_gemm(size, _DTYPES[precision], device)
    value = 2 * size**3 / median_seconds(run, device) / 1e12
    published = None if part is None else part.measured_tflops.get(precision)
    peak = None if part is None else part.peak_tflops.get(precision)
    reachable, basis = _reachable(part, device, PEAK_SHARE[precision], peak, "TFLOP/s")
    if published is not None and part is not None:
        reachable, basis = published, f"{published:g} TFLOP/s is the fastest published GEMM of {part.name}"
    return Measurement(f"GEMM {precision}", value, "TFLOP/s", reachable, basis, f"{size} x {size} x {size}")


def _plain_gemm(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b.t(), out=out)


def _fp8_gemm(size: int, platform: Platform, device: torch.device) -> Callable[[], object]:
    from isthmus.engine.linear.fp8_linear import scaled_mm
    from isthmus.engine.linear.fp8_quantization import Quantized

    e4m3, _ = platform.fp8_types()
    scale = torch.ones((), device=device)
    a, b = (Quantized(torch.randn(size, size, device=device).to(e4m3), scale, "tensorwise") for _ in range(2))
    return lambda: scaled_mm(a, b, torch.bfloat16, fast=True)


def _memory(device: torch.device, part: Part | None) -> Measurement:
    source = torch.ones(CPU_ELEMENTS if device.type == "cpu" else 1 << 28, device=device)
    target = torch.empty_like(source)
    value = 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device) / 1e9
    peak = None if part is None else part.memory_gb_s
    reachable, basis = _reachable(part, device, PEAK_SHARE["memory"], peak, "GB/s")
    return Measurement("memory bandwidth", value, "GB/s", reachable, basis, f"copy of {source.nbytes >> 20} MiB")


def _copies(device: torch.device, part: Part | None) -> Iterator[Measurement]:
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    reachable, basis = _reachable(part, device, PEAK_SHARE["host"], None if part is None else part.host_gb_s, "GB/s")
    ways: dict[str, tuple[Tensor, Tensor]] = {"host to device": (there, host), "device to host": (host, there)}
    for name, (target, source) in ways.items():
        value = host.nbytes / median_seconds(lambda t=target, s=source: t.copy_(s, non_blocking=True), device) / 1e9  # type: ignore[misc]
        yield Measurement(name, value, "GB/s", reachable, basis, f"pinned memory, {COPY_BYTES >> 20} MiB")


def all_reduce(platform: Platform) -> Measurement | None:
    """Bus bandwidth of an all-reduce over the GPUs of this machine, or over two ranks on a CPU.

    None for a single GPU. Raises RuntimeError if a rank fails or does not end.
    """
    ranks = platform.device_count() or 2
    if ranks == 1:
        return None
    part = platform.part() if isinstance(platform, GpuPlatform) else None
    seconds, numbytes = _run_ranks(ranks, platform.collective_backend)
    link = None if part is None else part.link_between(ranks)
    device = torch.device(platform.device_type)
    reachable, basis = _reachable(part, device, PEAK_SHARE["links"], link, "GB/s")
    what = f"{ranks} ranks, {platform.collective_backend}, {numbytes >> 20} MiB; bus bandwidth"
    return Measurement("all-reduce", 2 * (ranks - 1) / ranks * numbytes / seconds / 1e9, "GB/s", reachable, basis, what)


def _run_ranks(ranks: int, backend: str) -> tuple[float, int]:
    """Seconds of an all-reduce, and its bytes; each rank is a process of its own, because a collective may hang."""
    with tempfile.TemporaryDirectory(prefix="isthmus-doctor-") as folder:
        command = [sys.executable, "-m", "isthmus.tools.doctor.all_reduce_rank", str(Path(folder) / "store"), backend]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(ranks)],
                env=environment,
                stdin=subprocess.DEVNULL,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank in range(ranks)
        ]
        deadline = time.monotonic() + ALL_REDUCE_SECONDS
        try:
            outputs = [process.communicate(timeout=max(0.0, deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{ranks} ranks did not finish an all-reduce in {ALL_REDUCE_SECONDS:g} s") from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for process, (_, errors) in zip(processes, outputs, strict=True):
            if process.returncode:
                raise RuntimeError(f"a rank of the all-reduce failed: {' '.join(errors.split()[-60:])}")
        result = json.loads(outputs[0][0].splitlines()[-1])
        return float(result["seconds"]), int(result["bytes"])


def _reachable(
    part: Part | None, device: torch.device, share: float, peak: float | None, unit: str
) -> tuple[float | None, str]:
    if part is None or peak is None:
        what = "CPU" if device.type == "cpu" else "device"
        return None, f"no figure is known for this {what}, so it is not graded"
    return share * peak, f"{share:.0%} of the {peak:g} {unit} of the data sheet of {part.name}"


def median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median after a warm-up; on a GPU of batches, so that the time of a launch does not count."""
    calls = 10 if device.type == "cuda" else 1

    def once() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / calls

    once()
    times, deadline = list[float](), time.perf_counter() + SECONDS
    while len(times) < 3 or (time.perf_counter() < deadline and len(times) < 100):
        times.append(once())
    return statistics.median(times)
