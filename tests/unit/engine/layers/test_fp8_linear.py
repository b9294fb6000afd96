"""FP8 matmuls against float64 in the CPU emulation, and torch's kernel against the emulation."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from isthmus.engine.layers import fp8_linear as module
from isthmus.engine.layers.fp8_linear import (
    Fp8Recipe,
    Quantized,
    emulated_scaled_mm,
    fits,
    fp8_linear,
    quantize,
    scaled_mm,
)
from isthmus.platforms.torch_features import SCALED_MM

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Scaling = Literal["tensorwise", "rowwise"]
SCALINGS: tuple[Scaling, ...] = ("tensorwise", "rowwise")


def back(quantized: Quantized) -> Tensor:
    return quantized.values.double() * quantized.inverse_scale.double()


def error(got: Tensor, wanted: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return ((got.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(
    ("dtype", "relative"),
    [(E4M3, 2**-4), (E5M2, 2**-3), (torch.float8_e4m3fnuz, 2**-4), (torch.float8_e5m2fnuz, 2**-3)],
)
def test_rounding_error_of_the_dtype(scaling: Scaling, dtype: torch.dtype, relative: float) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(32, 48) * torch.logspace(-3, 3, 32)[:, None]
    found = quantize(matrix, dtype, scaling)
    assert found.inverse_scale.shape == (() if scaling == "tensorwise" else (32, 1))
    over = (0, 1) if scaling == "tensorwise" else 1
    amax = matrix.abs().amax(over, keepdim=True)
    # Half a step of the mantissa, or half a step of the smallest numbers.
    smallest = torch.finfo(dtype).smallest_normal * relative * amax / torch.finfo(dtype).max
    assert ((back(found) - matrix).abs() <= matrix.abs() * relative * 1.0001 + smallest).all()
    assert found.values.double().abs().max() == torch.finfo(dtype).max


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("value", [0.0, 1e-38, 3e-30, 1.0, 3e38])
def test_any_magnitude(scaling: Scaling, value: float) -> None:
    found = quantize(torch.full((16, 16), value), E4M3, scaling)
    assert found.inverse_scale.isfinite().all() and (found.inverse_scale >= 2.0**-126).all()
    if value in (3e-30, 1.0, 3e38):
        assert torch.allclose(back(found), torch.full((16, 16), value, dtype=torch.float64), rtol=1e-6)
    else:
        assert (back(found) <= value).all() or torch.allclose(back(found).float(), torch.tensor(value), rtol=0.1)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_values_stay_non_finite(scaling: Scaling, bad: float) -> None:
    matrix = torch.ones(16, 16)
    matrix[3, 5] = bad
    found = back(quantize(matrix, E4M3, scaling))
    assert found[3].isnan().all() and bool(found[4].isnan().all()) is (scaling == "tensorwise")


def layer(tokens: int, recipe: Fp8Recipe, *, width: int = 64, outputs: int = 48) -> dict[str, tuple[Tensor, Tensor]]:
    """Of output, input gradient and weight gradient: found and exact."""
    torch.manual_seed(0)
    # Some tokens and some rows are ten times as large as others.
    x = (torch.randn(tokens, 1, width) * torch.logspace(0, 1, tokens)[:, None, None]).requires_grad_()
    weight = (torch.randn(outputs, width) * torch.logspace(-1, 0, outputs)[:, None]).requires_grad_()
    upstream = torch.randn(tokens, 1, outputs)
    out = fp8_linear(x, weight, recipe)
    found = (out, *torch.autograd.grad(out, (x, weight), upstream))
    wide_x, wide_weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    wanted = wide_x @ wide_weight.t()
    exact = (wanted, *torch.autograd.grad(wanted, (wide_x, wide_weight), upstream.double()))
    return dict(zip(("out", "x", "weight"), zip(found, exact, strict=True), strict=True))


@pytest.mark.parametrize("tokens", [1, 7, 32])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("gradients", [E4M3, E5M2])
def test_matmuls_and_gradients(tokens: int, scaling: Scaling, gradients: torch.dtype) -> None:
    found = layer(tokens, Fp8Recipe(scaling, E4M3, gradients))
    errors = {name: error(*pair) for name, pair in found.items()}
    print(errors)
    # An operand is off by a uniform share of up to 2^-4 (2^-3 in e5m2), of which the root mean square is 0.6 at most.
    backward = 0.05 if gradients == E4M3 else 0.08
    assert 0 < errors["out"] < 0.05
    assert 0 < errors["x"] < backward and 0 < errors["weight"] < backward


def test_rowwise_scales_keep_small_tokens() -> None:
    """One scale for all flushes a token to zero that is 10^6 times smaller than the largest; its own does not."""
    torch.manual_seed(0)
    x = torch.randn(16, 64) * torch.logspace(-6, 0, 16)[:, None]
    weight = torch.randn(48, 64)
    wanted = x.double() @ weight.double().t()
    found = {how: fp8_linear(x, weight, Fp8Recipe(how, E4M3, E5M2)) for how in SCALINGS}
    assert found["tensorwise"][0].abs().max() == 0
    assert error(found["rowwise"][0], wanted[0]) < 0.06


@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros_give_zeros(scaling: Scaling) -> None:
    x, weight = torch.zeros(16, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    out = fp8_linear(x, weight, Fp8Recipe(scaling, E4M3, E5M2))
    assert (out == 0).all()
    gradients = torch.autograd.grad(out, (x, weight), torch.zeros_like(out))
    assert all((gradient == 0).all() for gradient in gradients)


def test_the_weight_gradient_is_added_to_the_buffer() -> None:
    torch.manual_seed(0)
    recipe = Fp8Recipe("tensorwise", E4M3, E5M2)
    x, weight = torch.randn(16, 32).bfloat16(), torch.randn(48, 32).bfloat16().requires_grad_()
    (wanted,) = torch.autograd.grad(fp8_linear(x, weight, recipe).sum(), weight)
    weight.main_grad = torch.ones(48, 32)  # type: ignore[attr-defined]
    fp8_linear(x, weight, recipe).sum().backward()
    assert weight.grad is None and weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert torch.equal(weight.main_grad, 1 + wanted.float())  # type: ignore[attr-defined]


def test_only_multiples_of_the_alignment_fit() -> None:
    assert fits(torch.empty(48, 32)) and not fits(torch.empty(48, 24)) and not fits(torch.empty(24, 32))


@pytest.mark.skipif(SCALED_MM is None, reason=f"torch {torch.__version__} has the kernel for GPUs only")
@pytest.mark.parametrize("public", [True, False])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_kernel_agrees_with_the_emulation(scaling: Scaling, public: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU kernel gets the same operands and recipes; torch also implements it for CPUs."""
    if not public:
        monkeypatch.setattr(module, "SCALED_MM", None)
    torch.manual_seed(0)
    a, b = quantize(torch.randn(32, 64), E4M3, scaling), quantize(torch.randn(48, 64), E4M3, scaling)
    ours, theirs = emulated_scaled_mm(a, b, torch.bfloat16), scaled_mm(a, b, torch.bfloat16, fast=False)
    assert torch.allclose(ours.float(), theirs.float(), rtol=2**-7, atol=1e-3)
