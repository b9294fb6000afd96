"""Detection of the platform, its reason, and errors for an unavailable one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from isthmus.errors import UsageError
from isthmus.platforms.detect import detect
from isthmus.platforms.environment import apply_env


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


@pytest.mark.usefixtures("mi300x")
def test_variables_are_set_before_hip_is_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def is_available() -> bool:
        seen.append(os.environ.get("HSA_NO_SCRATCH_RECLAIM"))
        return True

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    applied = apply_env(detect())
    assert seen == ["1"]
    assert applied["HSA_NO_SCRATCH_RECLAIM"][0] == "1"


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
