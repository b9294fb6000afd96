"""FP8 matmuls against float64 in the CPU emulation, and torch's kernel against the emulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.engine.compiled import set_compile
from isthmus.engine.linear import fp8_linear as module
from isthmus.engine.linear.fp8_linear import (
    Fp8Recipe,
    check_kernels,
    emulated_scaled_mm,
    fits,
    fp8_linear,
    fp8_step,
    scaled_mm,
)
from isthmus.engine.linear.fp8_quantization import Quantized, Scaling, quantize, quantize_both, quantize_columns
from isthmus.errors import UsageError
from isthmus.platforms.torch_features import SCALED_MM

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALINGS: tuple[Scaling, ...] = ("tensorwise", "rowwise")


def back(quantized: Quantized) -> Tensor:
    return quantized.values.double() * quantized.inverse_scale.double()


def error(got: Tensor, expected: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(
    ("dtype", "relative"),
    [(E4M3, 2**-4), (E5M2, 2**-3), (torch.float8_e4m3fnuz, 2**-4), (torch.float8_e5m2fnuz, 2**-3)],
)
def test_rounding_error_of_the_dtype(scaling: Scaling, dtype: torch.dtype, relative: float) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(32, 48) * torch.logspace(-3, 3, 32)[:, None]
    result = quantize(matrix, dtype, scaling)
    assert result.inverse_scale.shape == (() if scaling == "tensorwise" else (32, 1))
    over = (0, 1) if scaling == "tensorwise" else 1
    amax = matrix.abs().amax(over, keepdim=True)
    # Half a step of the mantissa, or half a step of the smallest numbers.
    smallest = torch.finfo(dtype).smallest_normal * relative * amax / torch.finfo(dtype).max
    assert ((back(result) - matrix).abs() <= matrix.abs() * relative * 1.0001 + smallest).all()
    assert result.values.double().abs().max() == torch.finfo(dtype).max


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("value", [0.0, 1e-38, 3e-30, 1.0, 3e38])
def test_any_magnitude(scaling: Scaling, value: float) -> None:
    result = quantize(torch.full((16, 16), value), E4M3, scaling)
    assert result.inverse_scale.isfinite().all() and (result.inverse_scale >= 2.0**-126).all()
    if value in (3e-30, 1.0, 3e38):
        assert torch.allclose(back(result), torch.full((16, 16), value, dtype=torch.float64), rtol=1e-6)
    else:
        assert (back(result) <= value).all() or torch.allclose(back(result).float(), torch.tensor(value), rtol=0.1)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_values_stay_non_finite(scaling: Scaling, bad: float) -> None:
    matrix = torch.ones(16, 16)
    matrix[3, 5] = bad
    result = back(quantize(matrix, E4M3, scaling))
    assert result[3].isnan().all() and bool(result[4].isnan().all()) is (scaling == "tensorwise")


def layer(tokens: int, recipe: Fp8Recipe, *, width: int = 64, outputs: int = 48) -> dict[str, tuple[Tensor, Tensor]]:
    """Of output, input gradient and weight gradient: found and exact."""
    torch.manual_seed(0)
    # Some tokens and some rows are ten times as large as others.
    x = (torch.randn(tokens, 1, width) * torch.logspace(0, 1, tokens)[:, None, None]).requires_grad_()
    weight = (torch.randn(outputs, width) * torch.logspace(-1, 0, outputs)[:, None]).requires_grad_()
    upstream = torch.randn(tokens, 1, outputs)
    out = fp8_linear(x, weight, recipe)
    results = (out, *torch.autograd.grad(out, (x, weight), upstream))
    wide_x, wide_weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    expected = wide_x @ wide_weight.t()
    exact = (expected, *torch.autograd.grad(expected, (wide_x, wide_weight), upstream.double()))
    return dict(zip(("out", "x", "weight"), zip(results, exact, strict=True), strict=True))


@pytest.mark.parametrize("tokens", [1, 7, 32])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("gradients", [E4M3, E5M2])
def test_matmuls_and_gradients(tokens: int, scaling: Scaling, gradients: torch.dtype) -> None:
    result = layer(tokens, Fp8Recipe(scaling, E4M3, gradients))
    errors = {name: error(*pair) for name, pair in result.items()}
    # An operand is off by a uniform share of up to 2^-4 (2^-3 in e5m2), of which the root mean square is 0.6 at most.
    backward = 0.05 if gradients == E4M3 else 0.08
    assert 0 < errors["out"] < 0.05
    assert 0 < errors["x"] < backward and 0 < errors["weight"] < backward


def test_rowwise_scales_keep_small_tokens() -> None:
    """One scale for all flushes a token to zero that is 10^6 times smaller than the largest; its own does not."""
    torch.manual_seed(0)
    x = torch.randn(16, 64) * torch.logspace(-6, 0, 16)[:, None]
    weight = torch.randn(48, 64)
    expected = x.double() @ weight.double().t()
    values = {how: fp8_linear(x, weight, Fp8Recipe(how, E4M3, E5M2)) for how in SCALINGS}
    assert values["tensorwise"][0].abs().max() == 0
    assert error(values["rowwise"][0], expected[0]) < 0.06


@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros_give_zeros(scaling: Scaling) -> None:
    x, weight = torch.zeros(16, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    out = fp8_linear(x, weight, Fp8Recipe(scaling, E4M3, E5M2))
    assert (out == 0).all()
    gradients = torch.autograd.grad(out, (x, weight), torch.zeros_like(out))
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_weight_gradient_is_added_to_the_buffer(scaling: Scaling) -> None:
    """Tensorwise in float32, without rounding to bfloat16 in each micro batch."""
    torch.manual_seed(0)
    recipe = Fp8Recipe(scaling, E4M3, E5M2)
    x, weight = torch.randn(16, 32).bfloat16(), torch.randn(48, 32).bfloat16().requires_grad_()
    inputs = (x.float(), weight.detach().float().requires_grad_()) if scaling == "tensorwise" else (x, weight)
    (expected,) = torch.autograd.grad(fp8_linear(*inputs, recipe).sum(), inputs[1])
    weight.main_grad = torch.ones(48, 32)  # type: ignore[attr-defined]
    fp8_linear(x, weight, recipe).sum().backward()
    assert weight.grad is None and weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert torch.equal(weight.main_grad, 1 + expected.float())  # type: ignore[attr-defined]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_first_gradient_of_a_step_overwrites_the_buffer(scaling: Scaling) -> None:
    """Where the step says that it is zero; a weight that is used again, or by a second micro batch, adds."""
    torch.manual_seed(0)
    recipe = Fp8Recipe(scaling, E4M3, E5M2)
    x, weight = torch.randn(16, 32), torch.randn(48, 32).requires_grad_()
    (gradient,) = torch.autograd.grad(fp8_linear(x, weight, recipe).sum(), weight)
    for zero, times in ((True, 1), (True, 2), (False, 1)):
        weight.main_grad = torch.full((48, 32), 0.5)  # type: ignore[attr-defined]
        with fp8_step(keeps_weights=False, gradients_are_zero=zero):
            for _ in range(times):
                fp8_linear(x, weight, recipe).sum().backward()
        expected = gradient * times if zero else gradient + 0.5
        assert torch.equal(weight.main_grad, expected)  # type: ignore[attr-defined]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("rows", [16, 19])
def test_columns_are_those_of_the_transpose(scaling: Scaling, rows: int) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(rows, 48) * torch.logspace(-3, 3, 48)
    padded = torch.nn.functional.pad(matrix.t(), (0, -rows % 16))
    expected = quantize(matrix, E4M3, scaling), quantize(padded.contiguous(), E4M3, scaling)
    ways = [quantize_both(matrix, E4M3, scaling), (expected[0], quantize_columns(matrix, E4M3, scaling))]
    if scaling == "tensorwise":
        ways.append((expected[0], quantize_columns(matrix, E4M3, scaling, expected[0].scale)))
    for results in ways:
        for ours, theirs in zip(results, expected, strict=True):
            assert ours.values.is_contiguous() and ours.inverse_scale.shape == theirs.inverse_scale.shape
            assert torch.equal(ours.values.float(), theirs.values.float())
            assert torch.equal(ours.inverse_scale, theirs.inverse_scale)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_weights_are_quantized_once_per_step(scaling: Scaling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layouts of each weight for any number of micro batches, with the same gradients; then the new weights."""
    torch.manual_seed(0)
    recipe = Fp8Recipe(scaling, E4M3, E5M2)
    weights = [torch.randn(48, 32).requires_grad_(), torch.randn(32, 48).requires_grad_()]
    quantized: list[int] = []

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(matrix: Tensor, *args: object) -> Any:
            quantized.extend(number for number, weight in enumerate(weights) if matrix.data_ptr() == weight.data_ptr())
            return real(matrix, *args)

        return run

    for function in (quantize, quantize_columns, quantize_both):
        monkeypatch.setattr(module, function.__name__, counted(function))

    def step(once: bool, micro_batches: int = 3) -> list[Tensor]:
        quantized.clear()
        generator = torch.Generator().manual_seed(1)
        with fp8_step(keeps_weights=once, gradients_are_zero=True):
            losses = [
                fp8_linear(fp8_linear(torch.randn(7, 32, generator=generator), weights[0], recipe), weights[1], recipe)
                for _ in range(micro_batches)
            ]
            return list(torch.autograd.grad(torch.stack(losses).square().sum(), weights))

    repeated = step(False)
    assert sorted(quantized) == [0] * 6 + [1] * 6
    remaining = step(True)
    assert sorted(quantized) == [0, 1]  # both layouts in one region
    assert all(torch.equal(a, b) for a, b in zip(remaining, repeated, strict=True))
    with torch.no_grad():
        weights[0].data.mul_(2)
    assert not torch.equal(step(True)[0], remaining[0])
    with pytest.raises(ZeroDivisionError), fp8_step(keeps_weights=True, gradients_are_zero=True):
        fp8_linear(torch.randn(7, 32), weights[0], recipe)
        raise ZeroDivisionError
    assert not module._step.keeps_weights


@pytest.mark.skipif(SCALED_MM is None, reason=f"torch {torch.__version__} has the kernel for GPUs only")
def test_kernels_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel for CPUs stands in for the one of a GPU."""
    recipe = Fp8Recipe("tensorwise", E4M3, E4M3)
    check_kernels(recipe, torch.device("cpu"))
    real = module.scaled_mm
    monkeypatch.setattr(module, "scaled_mm", lambda *args, **kwargs: real(*args, **kwargs) * 1.1)
    with pytest.raises(UsageError, match=r"tensorwise scaled_mm .* is wrong by 10% .* Use train.precision=bf16"):
        check_kernels(recipe, torch.device("cpu"))

    def fails(a: Quantized, *args: object, **kwargs: object) -> Tensor:
        if a.values.dtype == E5M2:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return real(a, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "scaled_mm", fails)
    with pytest.raises(UsageError, match=r"e5m2 .* fails on this GPU \(CUBLAS.*\). Use train.fp8_format=e4m3"):
        check_kernels(Fp8Recipe("tensorwise", E4M3, E5M2), torch.device("cpu"))


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


@pytest.mark.thorough
@pytest.mark.processes  # the C++ compiler
def test_compiled_quantization_pads_any_length() -> None:
    """The length is a variable to the compiler; in torch 2.6 it rounds quotients of negative sizes to zero."""
    for tokens in (48, 37, 5):
        matrix = torch.randn(tokens, 32)
        expected = quantize_both(matrix, E4M3, "tensorwise")
        set_compile(True, device="cpu")
        try:
            result = quantize_both(matrix, E4M3, "tensorwise")
        finally:
            set_compile(False)
        for ours, theirs in zip(result, expected, strict=True):
            assert torch.equal(ours.values.float(), theirs.values.float())
            assert torch.equal(ours.inverse_scale, theirs.inverse_scale)
