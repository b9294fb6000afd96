"""Grouped GEMMs equal a loop, gradients included; evenly spaced weights are not copied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isthmus.engine.linear.quantized_weight import QuantizedWeight
from isthmus.engine.moe import grouped_gemm
from isthmus.engine.moe.grouped_gemm import GemmKernels, GroupSizes, grouped_linear, stack_tensors
from isthmus.platforms.torch_features import GROUPED_MM

COUNTS = [3, 0, 5, 1]


def parts(dtype: torch.dtype) -> tuple[Tensor, list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 6, generator=generator).to(dtype).requires_grad_()
    weights = [torch.randn(4, 6, generator=generator).to(dtype).requires_grad_() for _ in COUNTS]
    return x, weights, torch.randn(9, 4, generator=generator).to(dtype)


def looped(x: Tensor, weights: list[Tensor]) -> Tensor:
    return torch.cat([part @ weight.t() for part, weight in zip(x.split(COUNTS), weights, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_groups_equal_a_loop(dtype: torch.dtype) -> None:
    x, weights, upstream = parts(dtype)
    expected = looped(x, weights)
    got = grouped_linear(x, GroupSizes(torch.tensor(COUNTS)), weights)
    assert torch.allclose(got, expected)
    mine = torch.autograd.grad(got, [x, *weights], upstream)
    theirs = torch.autograd.grad(expected, [x, *weights], upstream)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(mine, theirs, strict=True))
    assert not mine[2].any()  # the gradient of a group without rows is there, and nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_to_the_buffers(dtype: torch.dtype) -> None:
    x, weights, upstream = parts(dtype)
    for weight in weights:
        weight.main_grad = torch.ones(4, 6)  # type: ignore[attr-defined]
    grouped_linear(x, GroupSizes(torch.tensor(COUNTS)), weights).backward(upstream)
    leaves = [weight.detach().float().requires_grad_() for weight in weights]
    expected = torch.autograd.grad(looped(x.detach().float(), leaves), leaves, upstream.float())
    for weight, gradient in zip(weights, expected, strict=True):
        assert weight.grad is None and weight.grad_added_to_main_grad  # type: ignore[attr-defined]
        assert torch.allclose(weight.main_grad - 1, gradient, atol=1e-5 if dtype == torch.float32 else 0.05)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kernel", [False, True])
def test_quantized_weights_equal_dequantized_ones(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (extra: lora)")
    if kernel and GROUPED_MM is None:
        pytest.skip(f"torch {torch.__version__} has no grouped_mm")
    monkeypatch.setattr(grouped_gemm, "_has_kernel", lambda *_: kernel)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 64, generator=generator).requires_grad_()
    weights = [QuantizedWeight(torch.empty(16, 64), "nf4", x.device) for _ in COUNTS]
    for weight in weights:
        weight.quantize_(torch.randn(16, 64, generator=generator))
    result = grouped_linear(x, GroupSizes(torch.tensor(COUNTS)), weights)
    expected = looped(x, [weight.dequantize() for weight in weights])
    assert torch.allclose(result, expected)
    mine, theirs = (torch.autograd.grad(out.square().sum(), x)[0] for out in (result, expected))
    assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-4)


def test_no_rows() -> None:
    _, weights, _ = parts(torch.float32)
    out = grouped_linear(torch.empty(0, 6, requires_grad=True), GroupSizes(torch.zeros(4, dtype=torch.int64)), weights)
    out.sum().backward()
    assert out.shape == (0, 4)
    assert all(weight.grad is not None and not weight.grad.any() for weight in weights)


def test_stacking_is_a_view_if_possible() -> None:
    buffer = torch.arange(60.0)
    even = [buffer[start : start + 6].view(2, 3) for start in (4, 20, 36)]
    assert torch.equal(stack_tensors(even), torch.stack(even))
    assert stack_tensors(even).data_ptr() == even[0].data_ptr()
    for others in ([even[0], even[2], even[1]], [even[0], even[1], torch.ones(2, 3)], [even[0], even[0]]):
        assert torch.equal(stack_tensors(others), torch.stack(others))
        assert stack_tensors(others).data_ptr() != others[0].data_ptr()


@pytest.mark.skipif(GROUPED_MM is None, reason=f"torch {torch.__version__} has no grouped_mm")
@pytest.mark.parametrize("evenly", [True, False])
@pytest.mark.parametrize("kernels", [GemmKernels(), GemmKernels(weight_gradient=False), GemmKernels(matmul=False)])
def test_the_kernel_gets_the_same_matmuls(evenly: bool, kernels: GemmKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's kernel also runs on a CPU, where the loop is the default."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 8, generator=generator).requires_grad_()
    memory = torch.randn(4, 64, generator=generator)
    weights = [(row if evenly else row.clone())[:32].view(4, 8).requires_grad_() for row in memory]
    upstream = torch.randn(9, 4, generator=generator)
    expected = torch.autograd.grad(looped(x, weights), [x, *weights], upstream)
    monkeypatch.setattr(grouped_gemm, "_has_kernel", lambda *_: True)
    got = grouped_linear(x, GroupSizes(torch.tensor(COUNTS)), weights, kernels)
    assert torch.allclose(got, looped(x, weights), atol=1e-5)
    mine = torch.autograd.grad(got, [x, *weights], upstream)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, expected, strict=True))
