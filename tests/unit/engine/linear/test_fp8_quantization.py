"""FP8 in blocks: scales and values bit for bit, their layouts, and linear layers with them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.engine.compiled import set_compile
from isthmus.engine.linear import fp8_linear as linear
from isthmus.engine.linear import fp8_quantization as module
from isthmus.engine.linear.fp8_blocks import ROW_BLOCKS, SQUARE_BLOCKS, Blocks, swizzled_scales
from isthmus.engine.linear.fp8_linear import Fp8Recipe, check_kernels, emulated_scaled_mm, fits, fp8_linear, fp8_step
from isthmus.engine.linear.fp8_quantization import (
    Quantized,
    Scaling,
    ScalingName,
    dequantize,
    named_scaling,
    quantize,
    quantize_both,
    quantize_columns,
    unsupported_scaling,
)
from isthmus.errors import UsageError
from isthmus.platforms.detect import detect
from isthmus.platforms.torch_features import FLOAT8_E8M0

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MX = named_scaling("mxfp8")
NAMES: tuple[ScalingName, ...] = ("blockwise", "mxfp8")
needs_e8m0 = pytest.mark.skipif(FLOAT8_E8M0 is None, reason=f"torch {torch.__version__} has no float8_e8m0fnu")
pytestmark = needs_e8m0


def error(result: Tensor, expected: Tensor) -> float:
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


def reference(matrix: Tensor, dtype: torch.dtype, blocks: Any) -> tuple[Tensor, Tensor]:
    """Bytes of values, and inverse scales [rows, columns] of the blocks, one block after the other."""
    largest = torch.finfo(dtype).max
    rows, columns = matrix.size(0) // blocks.rows, matrix.size(1) // blocks.elements
    values, scales = torch.empty_like(matrix, dtype=dtype), torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            place = (
                slice(row * blocks.rows, (row + 1) * blocks.rows),
                slice(column * blocks.elements, (column + 1) * blocks.elements),
            )
            amax = matrix[place].abs().max()
            if blocks.is_mx:
                power = -126
                while math.ldexp(largest, power) < amax.item():
                    power += 1
                scale, inverse = torch.tensor(2.0**-power), torch.tensor(2.0**power)
            else:
                scale = torch.tensor(1.0) if amax == 0 else largest / amax
                inverse = 1 / scale
            values[place] = (matrix[place] * scale).clamp(-largest, largest).to(dtype)
            scales[row, column] = inverse
    return values.view(torch.uint8), scales


def inverse_scales(quantized: Quantized, blocks: Any) -> Tensor:
    """[rows, columns] float32."""
    scales = quantized.inverse_scale
    if blocks.is_mx:
        return scales.view(torch.float8_e8m0fnu).float()
    return scales[:, : quantized.values.size(1) // blocks.elements]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("blocks", [ROW_BLOCKS, SQUARE_BLOCKS, MX], ids=str)
def test_values_and_scales_bit_for_bit(blocks: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = (torch.randn(128, 384) * torch.logspace(-9, 9, 128)[:, None]).bfloat16()
    matrix[:, 128:160] = 0
    matrix[5, :32] = torch.linspace(1, torch.finfo(dtype).max, 32)
    values, scales = reference(matrix.float(), dtype, blocks)
    result = quantize(matrix, dtype, blocks)
    assert torch.equal(result.values.view(torch.uint8), values) and result.values.is_contiguous()
    assert torch.equal(inverse_scales(result, blocks), scales)
    expanded = scales.repeat_interleave(blocks.rows, 0).repeat_interleave(blocks.elements, 1)
    assert torch.equal(dequantize(result), values.view(dtype).float() * expanded)


@pytest.mark.parametrize(
    ("amax", "exponent"),
    [
        (448.0, 127), (448.0 + 2**-15, 128), (449.0, 128), (512.0, 128), (896.0, 128), (1.0, 119), (0.875, 118),
        (0.0, 1), (1e-45, 1), (2.0**-118, 1), (448 * 2.0**-126, 1), (448 * 2.0**-125, 2), (3e38, 247),
        (math.inf, 255), (math.nan, 255),
    ],
)  # fmt: skip
def test_e8m0_scales_of_the_largest_element(amax: float, exponent: int) -> None:
    """The smallest power of two with which it does not overflow; 127 is a scale of one, 255 is NaN."""
    matrix = torch.zeros(32, 64)
    matrix[3, 40] = -amax
    result = quantize(matrix, E4M3, MX)
    assert result.inverse_scale[3].tolist() == [1, exponent] and result.inverse_scale[4].tolist() == [1, 1]
    back = dequantize(result)
    if math.isfinite(amax):
        assert back[3, 40] == pytest.approx(-amax, rel=2**-4, abs=2.0**-136)
    else:
        assert back[3, 32:].isnan().all() and (back[3, :32] == 0).all()


@pytest.mark.parametrize("blocks", [ROW_BLOCKS, SQUARE_BLOCKS])
def test_a_value_that_is_not_finite_makes_its_block_nan(blocks: Blocks) -> None:
    matrix = torch.ones(128, 256)
    matrix[3, 200] = math.inf
    back = dequantize(quantize(matrix, E4M3, blocks))
    assert back[3, 128:].isnan().all() and (back[:, :128] == 1).all()
    assert bool(back[4, 128:].isnan().all()) is (blocks == SQUARE_BLOCKS)


def test_swizzled_scales_are_stored_in_tiles() -> None:
    """Of 128 rows and 4 columns, row r and column c at 16 (r mod 32) + 4 (r div 32) + c; padded to whole tiles."""
    torch.manual_seed(0)
    matrix = torch.randn(160, 5 * 32) * torch.logspace(-9, 9, 160)[:, None]
    scales = quantize(matrix, E4M3, MX).inverse_scale
    swizzled = swizzled_scales(scales)
    assert swizzled.shape == (256 * 8,)
    for row in range(160):
        for column in range(5):
            tile, inside = (row // 128) * 2 + column // 4, row % 128
            place = 512 * tile + inside % 32 * 16 + inside // 32 * 4 + column % 4
            assert swizzled[place] == scales[row, column]


@pytest.mark.parametrize("scaling", [ROW_BLOCKS, SQUARE_BLOCKS, MX], ids=str)
@pytest.mark.parametrize("rows", [128, 37])
def test_columns_are_rows_of_the_transpose(scaling: Any, rows: int) -> None:
    """With zeros for whole blocks; kernels read the scales of neighbouring rows together."""
    torch.manual_seed(0)
    matrix = torch.randn(rows, 256) * torch.logspace(-3, 3, 256)
    expected = quantize(matrix, E4M3, scaling), quantize(matrix.t().contiguous(), E4M3, scaling)
    both, columns = quantize_both(matrix, E4M3, scaling), quantize_columns(matrix, E4M3, scaling)
    for result, other in zip((*both, columns), (*expected, expected[1]), strict=True):
        assert torch.equal(result.values.float(), other.values.float()) and result.values.is_contiguous()
        assert torch.equal(result.inverse_scale, other.inverse_scale)
    padded = -(-rows // scaling.elements) * scaling.elements
    assert both[0].values.shape == (padded, 256) and both[1].values.shape == (256, padded)
    if scaling == ROW_BLOCKS:
        scales = both[0].inverse_scale, both[1].inverse_scale
        assert all(scale.t().is_contiguous() for scale in scales) and scales[0].stride() == (1, padded)
    if scaling == SQUARE_BLOCKS:
        assert both[0].inverse_scale.t().shape == (4, padded // 128)


def test_blocks_keep_what_outliers_of_other_blocks_destroy() -> None:
    """One element in 4096 is 10^6 times as large, and the others of its tensor or row become zero."""
    torch.manual_seed(0)
    matrix = torch.randn(128, 1024)
    outliers = torch.rand(128, 1024) < 2**-12
    ordinary = ~outliers

    def errors(scaling: Scaling) -> float:
        return error(
            dequantize(quantize(matrix * torch.where(outliers, 1e6, 1.0), E4M3, scaling))[ordinary], matrix[ordinary]
        )

    tensorwise, rowwise, blockwise, mx = map(errors, ("tensorwise", "rowwise", ROW_BLOCKS, MX))
    assert blockwise < 0.9 * rowwise <= 0.9 * tensorwise and mx < 0.9 * tensorwise


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backward", [E4M3, E5M2])
@pytest.mark.parametrize("tokens", [1, 37, 160])
def test_matmuls_are_those_of_the_rounded_operands(name: ScalingName, backward: torch.dtype, tokens: int) -> None:
    """Straight-through gradients: float64 matmuls of dequantized matrices, each with the scales of its sum."""
    torch.manual_seed(0)
    recipe = Fp8Recipe(named_scaling(name), E4M3, backward)
    x = (torch.randn(tokens, 1, 256) * torch.logspace(0, 1, tokens)[:, None, None]).requires_grad_()
    weight, grad = torch.randn(128, 256).requires_grad_(), torch.randn(tokens, 1, 128)
    out = fp8_linear(x, weight, recipe)
    grad_x, grad_weight = torch.autograd.grad(out, (x, weight), grad)
    assert out.shape == (tokens, 1, 128) and grad_x.shape == x.shape

    def back(matrix: Tensor, dtype: torch.dtype, scaling: Scaling) -> Tensor:
        return dequantize(quantize(matrix, dtype, scaling)).double()

    tokens_x, tokens_grad, matrix = x.detach().flatten(0, 1), grad.flatten(0, 1), weight.detach()
    scaling, of_weight = recipe.scaling, recipe.weight_scaling
    pairs = {
        "out": (out, back(tokens_x, E4M3, scaling) @ back(matrix, E4M3, of_weight).t(), x @ weight.t()),
        "x": (grad_x, back(tokens_grad, backward, scaling) @ back(matrix.t(), E4M3, of_weight).t(), grad @ weight),
        "weight": (
            grad_weight,
            back(tokens_grad.t(), backward, scaling) @ back(tokens_x.t(), E4M3, scaling).t(),
            tokens_grad.t() @ tokens_x,
        ),
    }
    for name_of, (result, rounded, exact) in pairs.items():
        rounded = rounded[:tokens] if name_of != "weight" else rounded
        assert error(result.detach().flatten(0, -2), rounded) < 1e-5, name_of
        assert error(result.detach(), exact.detach()) < (0.05 if backward == E4M3 or name_of == "out" else 0.08), (
            name_of
        )


@pytest.mark.parametrize("name", NAMES)
def test_weight_gradients_of_a_step(name: ScalingName) -> None:
    """Blockwise in float32, MXFP8 rounded as the activations; kept weights change nothing."""
    torch.manual_seed(0)
    recipe = Fp8Recipe(named_scaling(name), E4M3, E4M3)
    x, weight = torch.randn(48, 256).bfloat16(), torch.randn(128, 256).bfloat16().requires_grad_()
    inputs = (x.float(), weight.detach().float().requires_grad_()) if name == "blockwise" else (x, weight)
    (gradient,) = torch.autograd.grad(fp8_linear(*inputs, recipe).sum(), inputs[1])
    for keeps in (False, True):
        weight.main_grad = torch.full((128, 256), 0.5)  # type: ignore[attr-defined]
        with fp8_step(keeps_weights=keeps, gradients_are_zero=True):
            for _ in range(2):
                fp8_linear(x, weight, recipe).sum().backward()
        assert torch.equal(weight.main_grad, 2 * gradient.float())  # type: ignore[attr-defined]


def test_widths_are_multiples_of_a_block() -> None:
    assert [Fp8Recipe(named_scaling(name), E4M3, E5M2).multiple for name in ("rowwise", *NAMES)] == [16, 128, 32]
    assert fits(torch.empty(128, 256), 128) and not fits(torch.empty(128, 192), 128)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_checked(name: ScalingName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of operands, and each dtype of a result; without a kernel for CPUs, the emulation stands in."""
    calls: list[tuple[str, str, torch.dtype]] = []

    def matmul(a: Quantized, b: Quantized, dtype: torch.dtype, *, fast: bool, factor: float = 1.0) -> Tensor:
        calls.append((str(a.scaling), str(b.scaling), dtype))
        return emulated_scaled_mm(a, b, dtype) * factor

    monkeypatch.setattr(linear, "scaled_mm", matmul)
    monkeypatch.setattr(linear, "scaled_mm_into", lambda out, a, b: out.copy_(matmul(a, b, out.dtype, fast=False)))
    recipe = Fp8Recipe(named_scaling(name), E4M3, E5M2)
    check_kernels(recipe, torch.device("cpu"))
    kinds = {
        "blockwise": [
            ("1x128 float32", "128x128 float32", torch.bfloat16),
            ("1x128 float32", "1x128 float32", torch.float32),
        ],
        "mxfp8": [("1x32 e8m0", "1x32 e8m0", torch.bfloat16)] * 2,
    }
    assert calls == kinds[name] * 2
    monkeypatch.setattr(linear, "scaled_mm", lambda *args, **kwargs: matmul(*args, **kwargs, factor=1.1))
    with pytest.raises(UsageError, match=r"is wrong by 10% on this GPU. Use .*, or train.fp8_scaling=tensorwise"):
        check_kernels(recipe, torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "version", "reason"),
    [
        ("blockwise", (9, 0), None), ("blockwise", (10, 0), "sm_100 has no blockwise FP8 kernels"),
        ("blockwise", (8, 9), "sm_89 has no blockwise FP8 kernels"), ("mxfp8", (10, 0), None),
        ("mxfp8", (9, 0), "sm_90 has no mxfp8 matrix cores"), ("rowwise", (8, 9), None),
    ],
)  # fmt: skip
def test_gpus_with_kernels(
    name: ScalingName, version: tuple[int, int], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isthmus.platforms.cuda import CudaPlatform

    properties = SimpleNamespace(major=version[0], minor=version[1])
    monkeypatch.setattr(CudaPlatform, "properties", lambda self: properties)
    monkeypatch.setattr(module, "SCALED_MM", object())
    assert unsupported_scaling(name, CudaPlatform(reason="")) == reason
    monkeypatch.setattr(module, "SCALED_MM", None)
    missing = unsupported_scaling(name, CudaPlatform(reason=""))
    assert (missing is None) if name == "rowwise" else "no torch.nn.functional.scaled_mm" in str(missing)


def test_mxfp8_needs_the_dtype_of_its_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unsupported_scaling("mxfp8", detect("cpu")) is None
    monkeypatch.setattr(module, "FLOAT8_E8M0", None)
    assert "has no float8_e8m0fnu" in str(unsupported_scaling("mxfp8", detect("cpu")))
    assert unsupported_scaling("blockwise", detect("cpu")) is None


@pytest.mark.thorough
@pytest.mark.processes  # the C++ compiler
@pytest.mark.parametrize("scaling", [ROW_BLOCKS, SQUARE_BLOCKS, MX], ids=str)
def test_compiled_quantization(scaling: Scaling) -> None:
    """Of any length, in both layouts."""
    for tokens in (128, 37, 300):
        matrix = torch.randn(tokens, 256).bfloat16()
        expected = quantize_both(matrix, E4M3, scaling)
        set_compile(True, device="cpu")
        try:
            result = quantize_both(matrix, E4M3, scaling)
        finally:
            set_compile(False)
        for ours, theirs in zip(result, expected, strict=True):
            assert ours.scaling == scaling and (ours.inverse_scale.t().is_contiguous() or scaling != ROW_BLOCKS)
            assert torch.equal(ours.values.float(), theirs.values.float())
            assert torch.equal(ours.inverse_scale, theirs.inverse_scale)
