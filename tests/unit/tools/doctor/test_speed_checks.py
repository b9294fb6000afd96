"""Measurements of --bench and their grades."""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isthmus.cli.main import parse_and_run
from isthmus.errors import UsageError
from isthmus.platforms.cpu import CpuPlatform
from isthmus.platforms.parts import find_part
from isthmus.tools.doctor import all_reduce_rank, measurements, speed_checks
from isthmus.tools.doctor.machine import Machine
from isthmus.tools.doctor.measurements import Measurement, _reachable
from isthmus.tools.doctor.speed_checks import bench_checks, grade

CPU = CpuPlatform(reason="")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "CPU_GEMM", 32)
    monkeypatch.setattr(measurements, "CPU_ELEMENTS", 1 << 12)
    monkeypatch.setattr(measurements, "SECONDS", 0.0)


@pytest.mark.parametrize(("value", "level"), [(800.0, "ok"), (640.0, "ok"), (639.0, "warning"), (399.0, "error")])
def test_grades(value: float, level: str) -> None:
    finding = grade(Measurement("GEMM bf16", value, "TFLOP/s", 800.0, "800 is published", "8192 x 8192 x 8192"))
    assert finding.level == level and finding.source == "800 is published" and bool(finding.hint) == (level != "ok")
    assert (
        finding.text == f"GEMM bf16: {value:.3g} TFLOP/s (8192 x 8192 x 8192), {value / 800:.0%} of what can be reached"
    )


def test_every_measurement_has_a_hint() -> None:
    names = ("GEMM fp8", "memory bandwidth", "host to device", "device to host", "all-reduce")
    assert all(grade(Measurement(name, 1.0, "GB/s", 9.0, "", "")).hint for name in names)


def test_a_cpu_is_measured_without_a_grade() -> None:
    result, lines = list[Measurement](), list[str]()
    check, _ = bench_checks(lines.append, result.append)
    findings = list(check(Machine()))
    assert [item.name for item in result] == ["GEMM fp32", "GEMM bf16", "memory bandwidth"] == lines
    assert all(item.value > 0 and item.reachable is None for item in result)
    assert {finding.level for finding in findings} == {"ok"}
    assert all("no figure is known for this CPU" in finding.source for finding in findings)


def test_what_a_gpu_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published GEMMs first, else a share of the data sheet; nothing for unknown devices."""
    here = torch.device("cpu")
    h100, mi350 = find_part("NVIDIA H100 80GB HBM3"), find_part("AMD Instinct MI350X")
    assert h100 is not None and mi350 is not None
    gemm = measurements._gemm("bf16", CPU, here, h100)
    assert gemm.reachable == 794.5 and gemm.basis == "794.5 TFLOP/s is the fastest published GEMM of H100"
    gemm = measurements._gemm("bf16", CPU, here, mi350)
    assert gemm.reachable == pytest.approx(0.7 * 2306.9) and "of the data sheet of MI350X" in gemm.basis
    assert measurements._memory(here, h100).reachable == pytest.approx(0.8 * 3350)
    assert _reachable(None, torch.device("cuda"), 0.8, None, "GB/s") == (
        None, "no figure is known for this device, so it is not graded"
    )  # fmt: skip
    monkeypatch.setattr(measurements, "_run_ranks", lambda ranks, backend: (0.01, 1 << 30))
    result = measurements.all_reduce(CPU)
    assert result is not None and result.value == pytest.approx((1 << 30) / 0.01 / 1e9)
    gpu: Any = SimpleNamespace(device_count=lambda: 1)
    assert measurements.all_reduce(gpu) is None


def test_fp8_gemm_runs() -> None:
    """On a CPU the kernel is that of torch, which is slow."""
    result: Any = measurements._fp8_gemm(32, CPU, torch.device("cpu"))()
    assert (result.shape, result.dtype) == ((32, 32), torch.bfloat16)


@pytest.mark.processes
def test_two_ranks_all_reduce(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_reduce_rank, "_CPU_BYTES", 4096)
    fork = multiprocessing.get_context("fork")
    arguments = str(tmp_path / "store"), "gloo"
    ranks = [fork.Process(target=all_reduce_rank.main, args=(*arguments, rank, 2)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    result = json.loads(capfd.readouterr().out)
    assert result["seconds"] > 0 and result["bytes"] == 4096


@pytest.mark.processes
def test_ranks_that_fail_or_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def python(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    python('echo a library speaks; echo \'{"seconds": 0.5, "bytes": 4}\'')
    assert measurements._run_ranks(2, "gloo") == (0.5, 4)
    python("echo NCCL error >&2; exit 1")
    with pytest.raises(RuntimeError, match="a rank of the all-reduce failed: NCCL error"):
        measurements._run_ranks(2, "gloo")
    finding = speed_checks._all_reduce(CPU)
    assert not isinstance(finding, Measurement) and finding.level == "error" and "NCCL_DEBUG" in finding.hint
    monkeypatch.setattr(measurements, "ALL_REDUCE_SECONDS", 0.2)
    python("exec sleep 30")
    with pytest.raises(RuntimeError, match="did not finish an all-reduce"):
        measurements._run_ranks(2, "gloo")


def test_quick_does_not_measure() -> None:
    with pytest.raises(UsageError, match="--quick leaves out measurements"):
        parse_and_run(["doctor", "--quick", "--bench"])
