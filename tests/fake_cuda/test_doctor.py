"""What isthmus doctor reports about GPUs that torch sees, on simulated devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch

from fake_cuda.runner import FakeCuda


def reported(
    archs: list[str],
    kernels: Sequence[str] = (),
    peers: bool = True,
    count: int = 1,
    product: str = "right",
    environment: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Findings of the checks with torch; ``product`` is what the GPUs compute: right, wrong, or an error."""
    from isthmus.tools.doctor.gpu import torch_devices, torch_kernels
    from isthmus.tools.doctor.machine import Machine

    torch.cuda.get_arch_list = lambda: archs
    torch.cuda.device_count = lambda: count
    torch.cuda.can_device_access_peer = lambda first, second: peers
    torch.cuda.nccl.version = lambda: (2, 27, 5)
    torch.distributed.is_nccl_available = lambda: True
    real = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and str(args[0]).startswith("cuda:"):  # the devices of the check have values
            if product == "error":
                raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
            return self + 1 if product == "wrong" else self.clone()
        return real(self, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]
    results = [*torch_devices.check_devices(Machine(environment=environment or {}))]
    torch.Tensor.to = real  # type: ignore[method-assign]
    for name in kernels:
        results += getattr(torch_kernels, f"check_{name}")(Machine())
    return [asdict(item) for item in results]


@pytest.mark.parametrize(
    ("gpu", "archs", "kernels", "texts"),
    [
        (
            "sm_90", ["sm_80", "sm_90", "compute_90"], ["attention", "compiler", "collectives"],
            ["platform cuda", "1 of 1 GPUs compute", "fp8: sm_90 has fp8 matrix cores. The default is bf16",
             "peak of the device: 989 TFLOP/s", "attention: varlen passes", "attention with a window: flex passes",
             "attention: runs use varlen", "NCCL 2.27.5", "gloo"],
        ),
        (
            "gfx942", ["gfx90a", "gfx942"], ["collectives"],
            ["platform rocm", "1 of 1 GPUs compute", "bf16: gfx942 has bf16", "peak of the device: 1,307 TFLOP/s",
             "RCCL 2.27.5"],
        ),
        (
            "sm_80", ["sm_80"], [], ["fp8: no, sm_80 has no fp8 matrix cores", "1 of 1 GPUs compute"],
        ),
    ],
)  # fmt: skip
def test_device_and_its_kernels(
    fake_cuda: FakeCuda, gpu: str, archs: list[str], kernels: list[str], texts: list[str]
) -> None:
    results = fake_cuda.run(reported, gpu=gpu, archs=archs, kernels=kernels)
    assert [item for item in results if item["level"] != "ok" and not item["text"].startswith("compiler: ")] == []
    shown = "\n".join(item["text"] for item in results)
    assert [text for text in texts if text not in shown] == [], shown


@pytest.mark.parametrize(
    ("gpu", "arguments", "level", "text"),
    [
        ("sm_90", {"archs": ["sm_50", "sm_80"]}, "error", "GPU 0 is sm_90, and torch has kernels for sm_50, sm_80"),
        ("sm_90", {"archs": [], "product": "wrong"}, "error", "a matmul on GPU 0 (sm_90) is wrong by"),
        ("sm_90", {"archs": [], "product": "error"}, "error", "fails: CUDA error: uncorrectable ECC error encountered"),
        ("sm_90", {"archs": [], "peers": False, "count": 3}, "warning", "GPU 0 has no direct access to GPUs 1, 2"),
        (
            "gfx942", {"archs": [], "environment": {"GPU_MAX_HW_QUEUES": "8", "HSA_ENABLE_SDMA": "0"}}, "warning",
            "GPU_MAX_HW_QUEUES=8, and 2 is better: one queue for computation",
        ),
    ],
)  # fmt: skip
def test_faults(fake_cuda: FakeCuda, gpu: str, arguments: dict[str, Any], level: str, text: str) -> None:
    results = fake_cuda.run(reported, gpu=gpu, **arguments)
    (problem,) = (item for item in results if item["level"] != "ok")
    assert problem["level"] == level and text in problem["text"] and problem["hint"]
