"""Variables of the platform are set with a reason; useless or harmful ones get a remark."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.platforms import environment, gpu
from isthmus.platforms.base import RunShape
from isthmus.platforms.cpu import CpuPlatform
from isthmus.platforms.cuda import CudaPlatform
from isthmus.platforms.detect import detect
from isthmus.platforms.environment import apply_env, gpu_in_use, remarks_on
from isthmus.platforms.rocm import RocmPlatform


@pytest.mark.parametrize(
    ("variable", "value", "word"),
    [
        ("PYTORCH_ROCM_DEVICE", "0,1", "no program reads it"),
        ("GPU_MAX_HEAP_SIZE", "100", "OpenCL"),
        ("GPU_MAX_ALLOC_PERCENT", "100", "OpenCL"),
        ("HSA_ENABLE_SDMA", "0", "copy engines"),
        ("RCCL_MSCCL_ENABLE", "0", "no longer has MSCCL"),
        ("NCCL_IB_DISABLE", "1", "TCP"),
        ("NCCL_DEBUG", "INFO", "at length"),
        ("NCCL_P2P_DISABLE", "1", "slower paths"),
        ("HIP_LAUNCH_BLOCKING", "1", "for debugging"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "for debugging"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "for debugging"),
        ("MIOPEN_FIND_MODE", "3", "convolutions"),
        ("MIOPEN_DEBUG_CONV_IMPLICIT_GEMM", "1", "convolutions"),
        ("TE_HIPBLASLT_TUNING_RUN_COUNT", "10", "train.gemm_tuning=true"),
        ("NVTE_CK_USES_BWD_V3", "1", "TransformerEngine"),
    ],
)
def test_remark_on_each_variable(variable: str, value: str, word: str) -> None:
    (line,) = remarks_on({variable: value, "HOME": "/h"}, RunShape(), on_gpu=False)
    assert line.startswith(f"{variable}={value} is set: ") and word in line


def test_remarks_depend_on_value_and_run() -> None:
    right = {"HSA_ENABLE_SDMA": "1", "NCCL_IB_DISABLE": "0", "NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "0"}
    right |= {"NCCL_P2P_DISABLE": "0", "CUDA_LAUNCH_BLOCKING": "0", "TORCH_DISTRIBUTED_DEBUG": "INFO"}
    assert remarks_on(right, RunShape(), on_gpu=True) == []
    both = {"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert "all of them select devices" in remarks_on(both, RunShape(), on_gpu=True)[0]
    item = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert "parallel.fsdp" in remarks_on(item, RunShape(fsdp=True), on_gpu=True)[0]
    assert "parallel.async_tp" in remarks_on(item, RunShape(tp_or_cp=True, async_tp=True), on_gpu=True)[0]
    assert remarks_on({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, RunShape(tp_or_cp=True, async_tp=True), on_gpu=True) == []
    assert remarks_on(item, RunShape(fsdp=True), on_gpu=False) == remarks_on(item, RunShape(), on_gpu=True) == []
    assert "relies on 1" in remarks_on({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, RunShape(tp_or_cp=True), on_gpu=True)[0]


@pytest.mark.parametrize(
    ("arch", "run", "expected"),
    [
        ("gfx90a", RunShape(), {}),
        ("gfx90a", RunShape(tp_or_cp=True), {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ("gfx942:sramecc+:xnack-", RunShape(fsdp=True), {}),
        ("gfx90a", RunShape(tp_or_cp=True, async_tp=True), {}),
        (
            "gfx950:sramecc+",
            RunShape(nodes=2, tp_or_cp=True),
            {
                "CUDA_DEVICE_MAX_CONNECTIONS": "1", "RCCL_WARP_SPEED_AUTO": "0", "NCCL_CROSS_NIC": "0",
                "NCCL_PXN_DISABLE": "1", "NCCL_P2P_NET_CHUNKSIZE": "524288",
            },
        ),
    ],
)  # fmt: skip
def test_rocm_variables_depend_on_the_run(
    machine: Callable[..., None], arch: str, run: RunShape, expected: dict[str, str]
) -> None:
    machine(hip="7.0", name="AMD Instinct", gcnArchName=arch)
    platform = detect()
    always = {name: value for name, (value, _) in platform.env_defaults.items()}
    applied = apply_env(platform, run, device_known=True)
    assert {name: value for name, (value, _) in applied.items()} == always | expected
    assert all(os.environ[name] == value and len(why) > 20 for name, (value, why) in applied.items())


def test_gemm_tuning_is_on_where_there_are_kernels_to_choose_from(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(hip="7.0", name="AMD Instinct", gcnArchName="gfx942")
    platform = detect()
    assert platform.no_gemm_tuning is None
    monkeypatch.setenv("PYTORCH_TUNABLEOP_TUNING", "0")  # of the user: read the file, tune nothing
    applied = apply_env(platform, RunShape(gemm_tuning_file="/runs/x/gemm_tuning_rank3_gpu.csv"))
    tunable = {name: value for name, (value, _) in applied.items() if "TUNABLEOP" in name}
    assert tunable == {
        "PYTORCH_TUNABLEOP_ENABLED": "1", "PYTORCH_TUNABLEOP_FILENAME": "/runs/x/gemm_tuning_rank3_gpu.csv",
    }  # fmt: skip
    assert os.environ["PYTORCH_TUNABLEOP_TUNING"] == "0"
    assert not any("TUNABLEOP" in name for name in platform.env_of_run(RunShape()))
    machine(cuda="12.8", name="NVIDIA H200", major=9, minor=0)
    cuda = detect()
    assert "cuBLAS" in str(cuda.no_gemm_tuning) and "AMD" in str(detect("cpu").no_gemm_tuning)
    assert not any("TUNABLEOP" in name for name in cuda.env_of_run(RunShape(gemm_tuning_file="/x.csv")))


def test_variables_of_the_user_stay(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(hip="7.0", name="AMD Instinct", gcnArchName="gfx942")
    monkeypatch.setenv("NCCL_PXN_DISABLE", "0")
    applied = apply_env(detect(), RunShape(nodes=4))
    assert os.environ["NCCL_PXN_DISABLE"] == "0" and "NCCL_PXN_DISABLE" not in applied


@pytest.mark.parametrize("build", [{"cuda": "12.8", "major": 9, "minor": 0}, {"hip": "7.0", "gcnArchName": "gfx942"}])
def test_variables_of_a_run_are_set_before_the_first_device_query(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, build: dict[str, Any]
) -> None:
    machine(**build)
    run = RunShape(tp_or_cp=True, nodes=2, deterministic=True)
    seen: dict[str, str] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(seen.update(os.environ) or True))
    platform = detect("auto", run)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    applied = apply_env(platform, run, device_known=True)
    assert applied and all(seen[name] == value for name, (value, _) in applied.items())
    assert not any("too late" in why for _, why in applied.values())


def test_variables_that_are_set_too_late_are_reported(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(cuda="12.8", name="NVIDIA H200", major=9, minor=0)
    run = RunShape(deterministic=True, tp_or_cp=True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    applied = apply_env(detect("auto", run), run)
    assert "too late: this process has used the GPU before" in applied["CUDA_DEVICE_MAX_CONNECTIONS"][1]
    assert "too late" not in applied["NCCL_ALGO"][1]  # read for the first process group


def test_driver_that_another_library_has_opened_counts_as_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "_OPEN_FILES", tmp_path)
    cuda, rocm = CudaPlatform(reason=""), RocmPlatform(reason="")
    (tmp_path / "3").symlink_to("/dev/kfd")
    assert not gpu_in_use(cuda) and gpu_in_use(rocm) and not gpu_in_use(CpuPlatform(reason=""))


@pytest.mark.parametrize(
    ("build", "in_build", "variable", "line"),
    [
        ({"cuda": "12.8", "major": 9, "minor": 0}, True, None, "on: micro batches differ in length"),
        ({"hip": "7.0", "gcnArchName": "gfx950"}, True, None, "on: micro batches differ in length"),
        ({"hip": "6.4", "gcnArchName": "gfx942"}, False, None, "off: torch .* has none for this GPU"),
        ({"hip": "7.0", "gcnArchName": "gfx1100"}, True, None, "off, as by default"),
        ({"hip": "7.0", "gcnArchName": "gfx942"}, True, "PYTORCH_HIP_ALLOC_CONF", "off; PYTORCH_HIP.*:64 is set"),
        ({"cuda": "12.8", "major": 9, "minor": 0}, True, "PYTORCH_CUDA_ALLOC_CONF", "off; PYTORCH_CUDA.*:64 is set"),
    ],
)
def test_allocator_line_tells_what_torch_reports(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, build: dict[str, Any],
    in_build: bool, variable: str | None, line: str,
) -> None:  # fmt: skip
    machine(**build)
    if variable:
        monkeypatch.setenv(variable, "max_split_size_mb:64")
    on: list[str] = []
    monkeypatch.setattr(gpu, "SET_ALLOCATOR", on.append)

    def snapshot() -> dict[str, dict[str, bool]]:
        return {"allocator_settings": {"expandable_segments": on == ["expandable_segments:True"] and in_build}}

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", snapshot)
    (allocator_line,) = detect().prepare_process()
    assert re.fullmatch(f"memory allocator: expandable segments {line}", allocator_line)


def test_allocator_of_this_torch_takes_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if reported is None:
        pytest.skip("this torch reports it for GPUs only; tests/gpu/test_determinism.py checks it there")
    before = reported()
    gpu.SET_ALLOCATOR("expandable_segments:True")
    assert reported() == "expandable_segments:True"
    gpu.SET_ALLOCATOR(before)


def test_cuda_has_one_queue_where_ranks_communicate_within_a_layer(machine: Callable[..., None]) -> None:
    machine(cuda="12.8", name="NVIDIA H200", major=9, minor=0)
    platform = detect()
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in platform.env_of_run(RunShape(tp_or_cp=True))
    for run in (RunShape(), RunShape(fsdp=True, tp_or_cp=True), RunShape(async_tp=True, tp_or_cp=True)):
        assert "CUDA_DEVICE_MAX_CONNECTIONS" not in platform.env_of_run(run)
