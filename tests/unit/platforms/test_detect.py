"""Detection of the platform, its reason, and errors for an unavailable one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from isthmus.errors import UsageError
from isthmus.platforms import rank_env
from isthmus.platforms.detect import detect


@pytest.mark.usefixtures("mi300x")
def test_rocm() -> None:
    platform = detect()
    assert (platform.name, platform.device_type, platform.collective_backend) == ("rocm", "cuda", "nccl")
    assert "built for ROCm 6.4" in platform.reason and platform.reason.endswith("sees 8 devices")
    assert detect("rocm") == platform


def test_hip_wins_over_a_cuda_version(machine: Callable[..., None]) -> None:
    machine(hip="6.4", cuda="12.8")
    assert detect().name == "rocm"


@pytest.mark.usefixtures("h200")
def test_cuda() -> None:
    platform = detect()
    assert (platform.name, platform.device_type, platform.collective_backend) == ("cuda", "cuda", "nccl")
    assert "built for CUDA 12.8" in platform.reason


def test_build_without_gpu_support(machine: Callable[..., None]) -> None:
    machine(count=0)
    platform = detect()
    assert (platform.name, platform.device_type, platform.collective_backend) == ("cpu", "cpu", "gloo")
    assert "built without GPU support" in platform.reason


def test_build_without_a_device_names_the_variable_that_hides_them(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(cuda="12.8", count=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    platform = detect()
    assert platform.name == "cpu"
    assert platform.reason.endswith("sees no device (CUDA_VISIBLE_DEVICES='' is set)")


@pytest.mark.usefixtures("h200")
def test_platform_cpu_does_not_query_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("a question to the GPU's runtime"))
    assert detect("cpu").name == "cpu"


@pytest.mark.parametrize(
    ("build", "prefer", "message"),
    [
        ({"hip": "6.4"}, "cuda", "built for ROCm 6.4. Use platform=rocm, cpu or auto, or install a CUDA build"),
        ({"cuda": "12.8"}, "rocm", "built for CUDA 12.8. Use platform=cuda, cpu or auto, or install a ROCm build"),
        ({"count": 0}, "cuda", "built without GPU support. Use platform=cpu or auto, or install a CUDA build"),
        (
            {"cuda": "12.8", "count": 0},
            "cuda",
            "sees no device. Check whether nvidia-smi lists one, or use platform=cpu",
        ),
        ({"hip": "6.4", "count": 0}, "rocm", "sees no device. Check whether rocm-smi lists one, or use platform=cpu"),
        ({}, "tpu", "platform=tpu is unknown. Use auto, cpu, cuda or rocm"),
    ],
)
def test_unavailable_platform(machine: Callable[..., None], build: dict[str, str], prefer: str, message: str) -> None:
    machine(**build)
    with pytest.raises(UsageError) as caught:
        detect(prefer)
    assert message in str(caught.value)


@pytest.mark.usefixtures("h200")
def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "9")
    with pytest.raises(UsageError, match=r"9 ranks .* need one GPU each, and torch sees 8 devices.*--nproc 8"):
        detect()


@pytest.mark.parametrize(
    ("build", "masks"),
    [
        ({"cuda": "12.8", "major": 9, "minor": 0}, {"CUDA_VISIBLE_DEVICES": "5"}),
        ({"cuda": "12.8", "major": 9, "minor": 0}, {"CUDA_VISIBLE_DEVICES": "MIG-5c4cb9ef-3bd0-5d2b-8e0c-2d6f6a1f"}),
        ({"hip": "7.0", "gcnArchName": "gfx942"}, {"ROCR_VISIBLE_DEVICES": "5"}),
        ({"hip": "7.0", "gcnArchName": "gfx950"}, {"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "5"}),
        ({"cuda": "12.8", "major": 9, "minor": 0}, {}),  # Slurm with cgroups
    ],
)
def test_batch_system_may_show_each_task_its_own_device(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, build: dict[str, Any], masks: dict[str, str]
) -> None:
    machine(count=1, **build)
    for name, value in masks.items() | {("LOCAL_WORLD_SIZE", "8"), ("LOCAL_RANK", "5")}:
        monkeypatch.setenv(name, value)
    platform = detect()
    assert platform.device_index() == 0 and "sees 1 device" in platform.reason and platform.describe()
    assert "uuid-0" in platform.device_id() and all(value in platform.device_id() for value in masks.values())
    monkeypatch.setenv(rank_env.STOP_FILE, "/tmp/stop")  # of --nproc, whose ranks see the same devices
    with pytest.raises(UsageError, match=r"8 ranks .* torch sees 1 device.*Use --nproc 1, or platform=cpu"):
        detect()


@pytest.mark.usefixtures("h200")
def test_each_rank_has_the_device_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    ids = []
    for rank in range(8):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert detect().device_index() == rank
        ids.append(detect().device_id())
    assert len(set(ids)) == 8 and detect("cpu").device_id() == ""


def test_device_without_a_uuid_is_not_compared(machine: Callable[..., None]) -> None:
    machine(hip="6.4", gcnArchName="gfx942", uuid="00000000-0000-0000-0000-000000000000")
    assert detect().device_id() == ""


@pytest.mark.processes
def test_no_cuda_only_package_is_imported() -> None:
    """Detection of ROCm works with every such package blocked."""
    code = """
import sys
for name in ("pynvml", "transformer_engine", "apex", "flash_attn", "cupy", "bitsandbytes", "nvidia", "triton"):
    sys.modules[name] = None
import torch
torch.version.hip = "6.4"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
from isthmus.platforms.detect import detect
from isthmus.platforms.environment import apply_env
platform = detect()
apply_env(platform)
print(platform.name, [name for name in sys.modules if name.split(".")[0] in ("megatron", "transformers")])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["rocm", "[]"]
