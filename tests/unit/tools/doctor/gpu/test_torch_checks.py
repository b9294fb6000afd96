"""The checks with torch on this machine, whatever it has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from isthmus.engine import kernel_check
from isthmus.engine.attention.backends import self_check
from isthmus.errors import UsageError
from isthmus.platforms import detect
from isthmus.tools.doctor.gpu.torch_devices import _has_kernels, check_devices
from isthmus.tools.doctor.gpu.torch_kernels import check_attention, check_collectives, check_compiler, check_gemms
from isthmus.tools.doctor.machine import Machine
from unit.tools.doctor.simulated import findings, h100, simulate


@pytest.mark.slow
def test_this_machine_has_no_error() -> None:
    checks = (check_devices, check_attention, check_gemms, check_compiler, check_collectives)
    results = [finding for check in checks for finding in findings(check, Machine())]
    assert [finding for finding in results if finding.level == "error"] == []
    texts = [finding.text for finding in results]
    assert any(text.startswith("attention: blocks passes, errors ") for text in texts)
    assert any(text.startswith("attention with a window: runs use ") for text in texts) and "gloo" in texts


@pytest.mark.slow
def test_attention_that_is_wrong_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    self_check.self_check.cache_clear()
    monkeypatch.setitem(kernel_check.TOLERANCE, torch.float32, -1.0)
    monkeypatch.setitem(kernel_check.TOLERANCE, torch.bfloat16, -1.0)
    results = findings(check_attention, Machine())
    self_check.self_check.cache_clear()
    assert "attention: sdpa is not usable, its errors against float32 are" in "\n".join(
        item.text for item in results if item.level == "warning"
    )


def test_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (item,) = findings(check_devices, Machine())
    assert item.level == "error" and "import torch fails" in item.text


def test_gpus_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from isthmus.tools.doctor.gpu import torch_devices
    from isthmus.tools.doctor.gpu.torch_build import TorchBuild

    def no_driver() -> None:
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(torch_devices, "installed_torch", lambda: TorchBuild("2.13.0+cu130", "13.0", None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    (item,) = findings(check_devices, simulate(tmp_path, h100()))
    assert item.level == "error" and item.text.endswith("No CUDA GPUs are available")


def test_invalid_ranks_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(prefer: str = "auto") -> detect.Platform:
        if prefer == "cpu":
            return detect.CpuPlatform(reason="a test")
        raise UsageError("9 ranks on this machine need one GPU each")

    monkeypatch.setattr(detect, "detect", refuse)
    (item,) = findings(check_devices, Machine())
    assert item.level == "error" and "9 ranks" in item.text
    assert all(item.level == "ok" for item in findings(check_compiler, Machine()))


@pytest.mark.parametrize(
    ("arch", "built", "has"),
    [
        ("gfx942", ["gfx90a", "gfx942"], True),
        ("gfx1031", ["gfx1030", "gfx1100"], False),
        ("sm_90", ["sm_80", "sm_90a"], True),
        ("sm_86", ["sm_80", "sm_90"], True),
        ("sm_120", ["sm_80", "sm_90"], False),
        ("sm_120", ["sm_80", "compute_90"], True),
        ("sm_61", ["sm_70", "compute_90"], False),
    ],
)
def test_kernels_for_an_architecture(arch: str, built: list[str], has: bool) -> None:
    assert _has_kernels(arch, built) is has
