"""The traces themselves: what they refuse, count and know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fake_cuda.runner import FakeCuda, TaskFailed
from fake_cuda.trace import measure, record


def mixed_devices() -> None:
    torch.ones(4, device="cuda") + torch.ones(4)


def test_operators_refuse_tensors_on_two_devices(fake_cuda: FakeCuda) -> None:
    with pytest.raises(TaskFailed, match=r"two (different )?devices,? cuda:0"):
        fake_cuda.run(mixed_devices)


def synchronizing_operators() -> list[str]:
    x = torch.ones(4, device="cuda")
    host = torch.ones(4)
    with record() as trace:
        x.sum().item()
        x.cpu()
        x.to("cpu", non_blocking=True)
        host.to("cuda")
        host.to("cuda", non_blocking=True)
        host.pin_memory().to("cuda", non_blocking=True)
        torch.tensor([1.0, 2.0], device="cuda")
        x[torch.tensor([1, 2])]
        torch.zeros(2).copy_(x[:2])
        x.topk(2).indices.nonzero()
        torch.full((4,), 2.0, device="cuda").mul_(2.0)
    return [f"{sync.kind}: {sync.operator}" for sync in trace.syncs]


def test_synchronizations_are_listed(fake_cuda: FakeCuda) -> None:
    assert fake_cuda.run(synchronizing_operators) == [
        "read: _local_scalar_dense", "to host: _to_copy", "to device: _to_copy", "to device: _to_copy",
        "to device: _to_copy", "to device: index", "to host: copy_", "read: nonzero",
    ]  # fmt: skip


def count_kernels() -> dict[str, int]:
    x = torch.ones(1, 4, 8, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with record() as trace:
        F.scaled_dot_product_attention(x[:, :, 1:].transpose(1, 2).transpose(1, 2), x, x).sum().backward()
    return dict(trace.kernels)


def test_kernels_are_counted_without_views_and_attention_is_one(fake_cuda: FakeCuda) -> None:
    results = fake_cuda.run(count_kernels)
    assert (
        results["_scaled_dot_product_flash_attention"] == results["_scaled_dot_product_flash_attention_backward"] == 1
    )
    assert results["slice_backward"] == 1
    assert "transpose" not in results


def memory_of_a_function() -> list[int]:
    remaining = []
    with measure() as memory:
        remaining.append(torch.empty(1 << 20, device="cuda"))
        remaining[0] + 1
        live, peak = memory.live_bytes, memory.peak_bytes
        remaining.clear()
        return [live, peak, memory.live_bytes]


def test_live_and_peak_memory(fake_cuda: FakeCuda) -> None:
    assert fake_cuda.run(memory_of_a_function) == [4 << 20, 8 << 20, 0]


def routing_counts() -> list[int]:
    chosen = torch.randn(12, 8, device="cuda").topk(2, dim=-1).indices.flatten()
    counts = chosen.new_zeros(8).scatter_add_(0, chosen, torch.ones_like(chosen))
    return counts.cumsum(0).tolist()


def test_token_counts_are_those_of_a_uniform_routing(fake_cuda: FakeCuda) -> None:
    assert fake_cuda.run(routing_counts) == [3, 6, 9, 12, 15, 18, 21, 24]


def platform() -> list[Any]:
    from isthmus.platforms.detect import detect

    result = detect()
    return [result.name, result.describe(), str(result.fp8_types()[0]), result.peak_tflops("bf16")]


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("sm_90", ["cuda", "1 x NVIDIA H100 80GB HBM3 (sm_90, 80 GiB)", "torch.float8_e4m3fn", 989.4]),
        ("gfx942", ["rocm", "1 x AMD Instinct MI300X (gfx942, 192 GiB)", "torch.float8_e4m3fnuz", 1307.4]),
        ("gfx950", ["rocm", "1 x AMD Instinct MI355X (gfx950, 288 GiB)", "torch.float8_e4m3fn", 2516.6]),
    ],
)
def test_the_platform_is_that_of_the_gpu(fake_cuda: FakeCuda, gpu: str, expected: list[Any]) -> None:
    assert fake_cuda.run(platform, gpu=gpu) == expected
