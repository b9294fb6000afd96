"""Builds of torch and devices that this machine does not have."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from isthmus.platforms import environment, rank_env
from isthmus.platforms.cuda import CudaPlatform
from isthmus.platforms.rocm import RocmPlatform

RANK_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
OF_RUNS = (
    *("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    *("PYTORCH_TUNABLEOP_ENABLED", "PYTORCH_TUNABLEOP_TUNING", "PYTORCH_TUNABLEOP_FILENAME"),
    *("CUBLAS_WORKSPACE_CONFIG", "ROCBLAS_DEFAULT_ATOMICS_MODE", "NCCL_ALGO", rank_env.STOP_FILE),
    *("RCCL_WARP_SPEED_AUTO", "NCCL_CROSS_NIC", "NCCL_PXN_DISABLE", "NCCL_P2P_NET_CHUNKSIZE"),
)
MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def fresh_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables that platforms read or set, before and after each test."""
    ours = {*CudaPlatform(reason="").env_defaults, *RocmPlatform(reason="").env_defaults, *OF_RUNS}
    for variable in (*RANK_VARIABLES, *MASKS, *ours):
        monkeypatch.setenv(variable, "")  # so that monkeypatch restores it, also if it is absent now
        monkeypatch.delenv(variable)
    monkeypatch.setattr(environment, "_set_here", {})
    monkeypatch.setattr(environment, "set_late", set())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes torch look like a CUDA or ROCm build with devices."""

    def build(*, hip: str | None = None, cuda: str | None = None, count: int = 8, **properties: object) -> None:
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

        def answer(index: int) -> SimpleNamespace:
            assert index < count
            values = {"name": "a GPU", "uuid": f"uuid-{index}", "total_memory": 192 << 30} | properties
            return SimpleNamespace(**values, pci_bus_id=index)

        monkeypatch.setattr(torch.cuda, "get_device_properties", answer)

    return build


@pytest.fixture
def mi300x(machine: Callable[..., None]) -> None:
    """Eight MI300X under ROCm 6.4."""
    machine(hip="6.4.43482", name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-")


@pytest.fixture
def h200(machine: Callable[..., None]) -> None:
    """Eight H200 under CUDA 12.8."""
    machine(cuda="12.8", name="NVIDIA H200", major=9, minor=0)
