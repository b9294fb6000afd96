"""Deterministic mode: torch's flag and the variables of the libraries, or a refusal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from isthmus.config.schema.train import TrainConfig
from isthmus.errors import UsageError
from isthmus.platforms.base import RunShape
from isthmus.platforms.detect import detect
from isthmus.platforms.deterministic import restored_algorithms, use_deterministic_algorithms
from isthmus.platforms.environment import apply_env

RUN = RunShape(deterministic=True)
H200: dict[str, Any] = {"cuda": "12.8", "name": "NVIDIA H200", "major": 9, "minor": 0}
MI355X: dict[str, Any] = {"hip": "7.0", "name": "AMD Instinct MI355X", "gcnArchName": "gfx950:sramecc+"}


@pytest.fixture(autouse=True)
def own_settings_of_torch() -> Iterator[None]:
    with restored_algorithms():
        yield
    assert not torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (H200, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}),
        (MI355X, {"ROCBLAS_DEFAULT_ATOMICS_MODE": "0", "NCCL_ALGO": "Ring"}),
    ],
)
def test_on_a_gpu(machine: Callable[..., None], build: dict[str, Any], expected: dict[str, str]) -> None:
    machine(**build)
    platform = detect("auto", RUN)
    assert expected.items() <= os.environ.items()
    assert not expected.keys() & platform.env_of_run(RunShape()).keys()
    assert "raises an error where it has none" in use_deterministic_algorithms(platform)
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_on_a_cpu_nothing_changes() -> None:
    before = dict(os.environ)
    platform = detect("cpu", RUN)
    apply_env(platform, RUN, device_known=True)
    assert "changes nothing" in use_deterministic_algorithms(platform)
    assert not torch.are_deterministic_algorithms_enabled() and "NCCL_ALGO" not in os.environ.keys() - before.keys()


@pytest.mark.parametrize(("name", "value"), [("NCCL_ALGO", "NVLS"), ("CUBLAS_WORKSPACE_CONFIG", ":0:0")])
def test_variable_of_the_user_that_prevents_it_is_refused(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    machine(**H200)
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"needs {name}=.* or .*, got {value}. Unset it"):
        use_deterministic_algorithms(detect("auto", RUN))
    assert not torch.are_deterministic_algorithms_enabled()


def test_process_that_used_the_gpu_before_is_refused(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(**H200)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UsageError, match=r"used the GPU before CUBLAS_WORKSPACE_CONFIG=:4096:8 could be set"):
        use_deterministic_algorithms(detect("auto", RUN))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")


def test_gemm_tuning_is_refused() -> None:
    with pytest.raises(ValueError, match="gemm_tuning=true selects kernels by their speed"):
        TrainConfig(deterministic=True, gemm_tuning=True)
