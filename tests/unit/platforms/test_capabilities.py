"""Capabilities of each platform, without the hardware."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import ANY

import psutil
import pytest
import torch

from isthmus.platforms import cpu as cpu_module
from isthmus.platforms.base import Platform
from isthmus.platforms.cpu import CpuPlatform
from isthmus.platforms.cuda import CudaPlatform
from isthmus.platforms.detect import detect
from isthmus.platforms.environment import apply_env
from isthmus.platforms.rocm import RocmPlatform

PLATFORMS: list[Platform] = [CpuPlatform(reason=""), CudaPlatform(reason=""), RocmPlatform(reason="")]


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
        ("NVIDIA H100 PCIe", 756, 51),
        ("NVIDIA H100 NVL", 835, 60),
        ("NVIDIA H200", 989.4, 66.9),
        ("NVIDIA GH200 480GB", 989.4, 66.9),
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA B200", 2250, 75),
        ("NVIDIA GB200", 2500, 80),
        ("NVIDIA H200 MIG 1g.18gb", None, None),
        ("NVIDIA L4", 121, 30.3),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA RTX A1000", None, None),
        ("NVIDIA GeForce GTX 1080", None, None),
    ],
)
def test_peaks_of_nvidia_devices(
    machine: Callable[..., None], name: str, bf16: float | None, fp32: float | None
) -> None:
    machine(cuda="12.8", name=name, major=9, minor=0)
    platform = detect()
    assert (platform.peak_tflops("bf16"), platform.peak_tflops("fp32")) == (bf16, fp32)
    assert platform.peak_tflops("int3") is None


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("AMD Instinct MI355X", 2516.6),
        ("AMD Instinct MI325X", 1307.4),
        ("AMD Instinct MI300X OAM", 1307.4),
        ("AMD Instinct MI300A", 980.6),
        ("AMD Instinct MI250X / MI250", 191.5),
        ("AMD Radeon Graphics", None),
    ],
)
def test_peaks_of_amd_devices(machine: Callable[..., None], name: str, bf16: float | None) -> None:
    machine(hip="6.4", name=name, gcnArchName="gfx942")
    assert detect().peak_tflops("bf16") == bf16


@pytest.mark.parametrize(
    ("arch", "bf16", "fp8"),
    [
        ("gfx950:sramecc+:xnack-", True, True),
        ("gfx942:sramecc+:xnack-", True, True),
        ("gfx90a", True, False),
        ("gfx1100", True, False),
        ("gfx906", False, False),
    ],
)
def test_amd_matrix_cores(machine: Callable[..., None], arch: str, bf16: bool, fp8: bool) -> None:
    machine(hip="6.4", name="AMD", gcnArchName=arch)
    platform = detect()
    bare = arch.partition(":")[0]
    assert platform.supports("bf16") == (bf16, f"{bare} has {'' if bf16 else 'no '}bf16 matrix cores")
    assert platform.default_precision() == ("bf16" if bf16 else "fp32", platform.supports("bf16")[1])
    assert platform.supports("fp8")[0] is fp8
    standard = (torch.float8_e4m3fn, torch.float8_e5m2)
    before = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    assert platform.fp8_types() == (before if bare == "gfx942" else standard)
    assert platform.supports("fp32") == (True, f"{bare} has fp32 arithmetic")


@pytest.mark.parametrize(
    ("major", "minor", "supported"),
    [(7, 0, {"fp16"}), (8, 0, {"fp16", "bf16"}), (8, 9, {"fp16", "bf16", "fp8"}), (10, 0, {"fp16", "bf16", "fp8"})],
)
def test_nvidia_matrix_cores(machine: Callable[..., None], major: int, minor: int, supported: set[str]) -> None:
    machine(cuda="12.8", name="NVIDIA", major=major, minor=minor)
    platform = detect()
    assert {name for name in ("fp16", "bf16", "fp8", "fp7") if platform.supports(name)[0]} == supported
    assert platform.default_precision()[0] == ("bf16" if "bf16" in supported else "fp32")
    assert f"sm_{major}{minor}" in platform.describe() and "8 x NVIDIA" in platform.describe()


def test_gpu_memory_and_count(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(cuda="12.8", name="NVIDIA H200", major=9, minor=0, count=4)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 3 * 2**29)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 3})
    assert detect().memory_gib() == 1.5 and detect().memory_retries() == 3 and detect("cpu").memory_retries() == 0
    assert detect().device_count() == 4


@pytest.mark.parametrize(("facts", "unit"), [({"amx_bf16": True}, "AMX"), ({"avx512_bf16": True}, "AVX512"), ({}, "")])
def test_cpu_default_is_fp32_with_a_hint_about_bf16(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, bool], unit: str
) -> None:
    monkeypatch.setattr(cpu_module, "_cpu_capabilities", lambda: facts)
    platform = detect("cpu")
    precision, why = platform.default_precision()
    assert precision == "fp32" and unit in why and ("train.precision=bf16" in why) is bool(unit)
    assert all(platform.supports(precision)[0] for precision in ("fp32", "bf16", "fp16"))
    assert platform.supports("fp8") == (False, ANY) and "sm_89" in platform.supports("fp8")[1]
    assert platform.peak_tflops("fp32") is None and platform.device_count() is None and platform.describe()


def test_cpu_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    platform = detect("cpu")
    if Path("/proc/self/status").exists():
        assert 0.05 < platform.memory_gib() < 2**10
    # getrusage would report the peak of the parent process if that is larger.
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t     512 kB\n")
    monkeypatch.setattr(cpu_module, "_STATUS", status)
    assert platform.memory_gib() == 2**-11
    # The share is of the machine, also if the container has less memory.
    monkeypatch.setattr("isthmus.platforms.base.free_bytes", lambda: 0)
    available, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    assert platform.memory_used() == pytest.approx(1 - available / total, abs=0.1)


_PAGE_FAULTS = """
import resource, torch
from isthmus.platforms.cpu import CpuPlatform

def page_faults():
    torch.ones(12 << 20).sum()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(12 << 20).sum()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

page_faults()
print(*CpuPlatform(reason="").prepare_process(), sep="; ")
page_faults()
"""
"""Page faults of five large tensors, allocated and freed one after the other, before and after the preparation."""


@pytest.mark.processes
@pytest.mark.skipif(os.confstr_names.get("CS_GNU_LIBC_VERSION") is None, reason="only glibc is configured")
def test_freed_memory_is_kept_on_a_cpu() -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MALLOC_") and name not in ("GLIBC_TUNABLES", "LD_PRELOAD")
    }
    code = [sys.executable, "-c", _PAGE_FAULTS]
    stdout = subprocess.run(code, capture_output=True, text=True, check=True, env=environment).stdout
    before, line, after = stdout.splitlines()
    assert int(after) < 1000 < int(before)
    assert line.startswith("memory allocator: freed memory is kept")


def test_configured_allocator_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    line = detect("cpu").prepare_process()[0]
    assert line.startswith("memory allocator: unchanged, since") and "MALLOC_ARENA_MAX" in line


@pytest.mark.parametrize(
    ("facts", "faster"),
    [
        ({"avx512_f": True, "cpu_name": "AMD EPYC"}, True),
        ({"avx512_f": True, "cpu_name": "Intel Xeon Processor"}, False),
        ({"avx512_f": True}, False),
        ({"avx512_f": False, "cpu_name": "AMD EPYC"}, False),
        ({}, False),
    ],
)
def test_onednn_for_avx512_processors_not_from_intel(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, object], faster: bool
) -> None:
    monkeypatch.setattr(cpu_module, "_cpu_capabilities", lambda: facts)
    monkeypatch.setattr(cpu_module, "_keep_freed_memory", lambda: None)
    assert cpu_module.onednn_is_faster() is faster
    assert [line.split(" if ")[0] for line in detect("cpu").prepare_process()] == ["fp32 matmuls: oneDNN"] * faster


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: platform.name)
def test_every_variable_has_a_value_and_a_reason(platform: Platform) -> None:
    for variable, (value, why) in platform.env_defaults.items():
        assert variable.isupper() and value and len(why) > 20


def test_variables_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_MAX_HW_QUEUES", "4")
    monkeypatch.setenv("HSA_ENABLE_SDMA", "")
    platform = RocmPlatform(reason="")
    applied = apply_env(platform)
    assert os.environ["GPU_MAX_HW_QUEUES"] == "4" and os.environ["HSA_ENABLE_SDMA"] == ""
    assert os.environ["HSA_NO_SCRATCH_RECLAIM"] == "1" and "scratch" in applied["HSA_NO_SCRATCH_RECLAIM"][1]
    assert not {"GPU_MAX_HW_QUEUES", "HSA_ENABLE_SDMA"} & applied.keys()
    assert apply_env(platform) == applied
