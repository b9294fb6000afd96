"""Grouped FP8 matmuls of experts: the numbers of one matmul for each expert with dequantized operands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.engine.linear import fp8_linear
from isthmus.engine.linear.fp8_linear import fp8_step
from isthmus.engine.linear.fp8_quantization import Quantized, quantize
from isthmus.engine.moe import fp8_experts as module
from isthmus.engine.moe.fp8_experts import check_grouped_kernel, fp8_grouped_matmul
from isthmus.engine.moe.grouped_gemm import GroupSizes, grouped_linear
from isthmus.errors import UsageError

E4M3 = torch.float8_e4m3fn
COUNTS = [3, 0, 21, 1]
MULTIPLY = partial(fp8_grouped_matmul, dtype=E4M3)


def operands(*, evenly: bool = True) -> tuple[Tensor, list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(COUNTS), 32, generator=generator) * torch.logspace(-3, 3, sum(COUNTS))[:, None]
    memory = torch.randn(len(COUNTS), 2048, generator=generator)
    weights = [(row if evenly else row.clone())[: 48 * 32].view(48, 32).requires_grad_() for row in memory]
    return x.requires_grad_(), weights, torch.randn(sum(COUNTS), 48, generator=generator)


def dequantized(matrix: Tensor) -> Tensor:
    """float64, of the numbers with a scale for each row."""
    quantized = quantize(matrix.detach().contiguous(), E4M3, "rowwise")
    return quantized.values.double() * quantized.inverse_scale.double()


@pytest.mark.parametrize("evenly", [True, False])
def test_values_and_gradients(evenly: bool) -> None:
    x, weights, upstream = operands(evenly=evenly)
    sizes = GroupSizes(torch.tensor(COUNTS))
    out = grouped_linear(x, sizes, weights, multiply=MULTIPLY)
    grad_x, *grad_weights = torch.autograd.grad(out, [x, *weights], upstream)
    parts = zip(x.split(COUNTS), upstream.split(COUNTS), weights, strict=True)
    expected = [(dequantized(a) @ dequantized(w).t(), dequantized(g) @ dequantized(w.t()).t()) for a, g, w in parts]
    for result, references in zip((out, grad_x), zip(*expected, strict=True), strict=True):
        assert torch.allclose(result.double(), torch.cat(references), rtol=1e-5, atol=1e-5)
    # A row keeps its digits, however small it is beside the others.
    exact = torch.cat([a @ w.t() for a, w in zip(x.split(COUNTS), weights, strict=True)])
    errors = (out - exact).norm(dim=1) / exact.norm(dim=1)
    assert 0 < errors.min() and errors.max() < 0.06
    unquantized = torch.autograd.grad(grouped_linear(x, sizes, weights), weights, upstream)
    assert all(torch.equal(a, b) for a, b in zip(grad_weights, unquantized, strict=True))


def test_no_rows() -> None:
    _, weights, _ = operands()
    out = grouped_linear(torch.empty(0, 32), GroupSizes(torch.zeros(4, dtype=torch.int64)), weights, multiply=MULTIPLY)
    assert out.shape == (0, 48)


def test_weights_are_quantized_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[torch.Size] = []

    def counted(matrix: Tensor, *args: Any) -> Quantized:
        shapes.append(matrix.shape)
        return fp8_linear.quantize(matrix, *args)

    monkeypatch.setattr(module, "quantize", counted)
    x, weights, upstream = operands()
    results = {}
    for keeps in (False, True):
        shapes.clear()
        with fp8_step(keeps_weights=keeps, gradients_are_zero=True):
            for _ in range(2):
                out = grouped_linear(x, GroupSizes(torch.tensor(COUNTS)), weights, multiply=MULTIPLY)
                results[keeps] = out, *torch.autograd.grad(out, x, upstream)
        assert sum(len(shape) == 3 for shape in shapes) == (2 if keeps else 4)
    assert all(torch.equal(a, b) for a, b in zip(results[False], results[True], strict=True))


def kernel_with(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The kernel of a GPU, as its documentation describes it, with changed results."""

    def kernel(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, offs: Tensor, out_dtype: Any) -> Tensor:
        assert a.dtype == b.dtype == E4M3 and offs.dtype == torch.int32 and out_dtype == torch.bfloat16
        assert b.stride()[-2:] == (1, b.size(1)) and scale_a.shape == a.shape[:1] and scale_b.shape == b.shape[::2]
        ends = offs.tolist()
        parts = [
            (a[start:end].float() @ b[group].float()) * scale_a[start:end, None] * scale_b[group]
            for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
        ]
        return change(torch.cat(parts)).to(out_dtype)

    return kernel


def test_the_kernel_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(module, "SCALED_GROUPED_MM", kernel_with(lambda result: result))
    check_grouped_kernel(E4M3, device)
    monkeypatch.setattr(module, "SCALED_GROUPED_MM", kernel_with(lambda result: result * 1.1))
    with pytest.raises(UsageError, match=r"is wrong by 10% on this GPU. Leave it out"):
        check_grouped_kernel(E4M3, device)

    def fails(*_args: object, **_options: object) -> Tensor:
        raise RuntimeError("only compute capability 9.0")

    monkeypatch.setattr(module, "SCALED_GROUPED_MM", fails)
    with pytest.raises(UsageError, match=r"fails on this GPU \(only compute capability 9.0\)"):
        check_grouped_kernel(E4M3, device)
    monkeypatch.setattr(module, "SCALED_GROUPED_MM", None)
    with pytest.raises(UsageError, match=r"has no _scaled_grouped_mm"):
        check_grouped_kernel(E4M3, device)
