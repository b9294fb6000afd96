"""Experts and FP8 linear layers on a GPU: values against float64, the timed choice, compiled quantization."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.engine.compiled import choose_compile, compiled_versions, set_compile
from isthmus.engine.host_copies import HostCopy, to_device
from isthmus.engine.linear.fp8_blocks import Blocks
from isthmus.engine.linear.fp8_linear import Fp8Recipe, check_kernels, fp8_linear, fp8_step
from isthmus.engine.linear.fp8_quantization import (
    ScalingName,
    dequantize,
    named_scaling,
    quantize,
    quantize_both,
    quantize_columns,
    unsupported_scaling,
)
from isthmus.engine.moe.fp8_experts import check_grouped_kernel
from isthmus.engine.moe.gemm_choice import time_gemms
from isthmus.engine.moe.grouped_gemm import GemmKernels, GroupSizes, grouped_linear
from isthmus.engine.moe.routed_tokens import RoutedTokens, expert_capacity
from isthmus.engine.moe.router import route, within_capacity
from isthmus.engine.moe.token_dispatcher import Keep, run_local
from isthmus.errors import UsageError
from isthmus.families.blocks.feed_forward import Experts
from isthmus.platforms.detect import detect
from isthmus.platforms.torch_features import GROUPED_MM

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COUNTS = [0, 130, 7, 0, 55]
SCALINGS: tuple[ScalingName, ...] = ("tensorwise", "rowwise", "blockwise", "mxfp8")


def error(result: Tensor, expected: Tensor) -> float:
    return ((result.double() - expected).norm() / expected.norm()).item()


@pytest.mark.skipif(GROUPED_MM is None, reason=f"torch {torch.__version__} has no grouped_mm")
@pytest.mark.parametrize("kernels", [GemmKernels(), GemmKernels(weight_gradient=False), GemmKernels(False, False)])
def test_grouped_gemms(kernels: GemmKernels) -> None:
    """With empty groups, and gradients added to float32 buffers."""
    torch.manual_seed(0)
    x = torch.randn(sum(COUNTS), 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    stacked = torch.randn(len(COUNTS), 96, 64, device=DEVICE, dtype=torch.bfloat16)
    weights: list[Any] = [torch.nn.Parameter(weight) for weight in stacked]
    buffers = torch.ones(len(COUNTS), 96, 64, device=DEVICE)
    for weight, buffer in zip(weights, buffers, strict=True):
        weight.main_grad = buffer
    grad = torch.randn(sum(COUNTS), 96, device=DEVICE, dtype=torch.bfloat16)
    out = grouped_linear(x, GroupSizes(torch.tensor(COUNTS, device=DEVICE)), weights, kernels)
    out.backward(grad)
    wide, leaves = x.detach().double().requires_grad_(), [item.double().requires_grad_() for item in stacked]
    expected = torch.cat([part @ leaf.t() for part, leaf in zip(wide.split(COUNTS), leaves, strict=True)])
    grad_x, *of_weights = torch.autograd.grad(expected, [wide, *leaves], grad.double(), materialize_grads=True)
    assert error(out, expected) < 5e-3 and x.grad is not None and error(x.grad, grad_x) < 5e-3
    assert error(buffers - 1, torch.stack(of_weights)) < 5e-3


def test_the_choice_of_gemms() -> None:
    """Both ways agree, or the kernel is not chosen."""
    for timing in time_gemms(4, ((256, 128), (128, 128)), 1000, DEVICE):
        print(timing)
        assert timing.loop_ms > 0 and (timing.difference < 0.02 or not timing.kernel)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
def test_capacity_without_reading_the_number_of_dropped_choices(factor: float) -> None:
    torch.manual_seed(0)
    hidden, logits = torch.randn(200, 64, device=DEVICE), torch.randn(200, 8, device=DEVICE) * 2
    experts = list(torch.randn(8, 64, 64, device=DEVICE).requires_grad_().unbind())

    def run(keep: Keep) -> list[Tensor]:
        x = hidden.clone().requires_grad_()
        weights, chosen = route(logits, None, Experts(num_experts=8, top_k=2, ffn_hidden_size=4))
        chosen = within_capacity(weights, chosen, 8, factor)

        def compute(rows: Tensor, scales: Tensor, sizes: GroupSizes) -> Tensor:
            return grouped_linear(rows * scales[:, None], sizes, experts)

        out = run_local(x, weights, chosen, compute, range(8), keep)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *experts])]

    bound = 8 * expert_capacity(400, 8, factor)
    result, expected = run(lambda routed: routed.keep_at_most(bound)), run(RoutedTokens.keep_counted)
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-2) for a, b in zip(result, expected, strict=True))


def test_host_copies_have_the_values_of_their_start() -> None:
    values = to_device(torch.arange(1000), DEVICE)
    copy = HostCopy(values * 2)
    busy = torch.randn(1024, 1024, device=DEVICE)
    for _ in range(20):
        busy = busy @ busy / 32
    assert torch.equal(copy.read(), torch.arange(1000) * 2)


@pytest.fixture
def recipe(request: pytest.FixtureRequest) -> Fp8Recipe:
    platform = detect()
    supported, why = platform.supports("fp8")
    if not supported and DEVICE.type == "cuda":
        pytest.skip(why)
    if (missing := unsupported_scaling(request.param, platform)) is not None:
        pytest.skip(missing)
    return Fp8Recipe(named_scaling(request.param, swizzled=platform.swizzled_mx_scales), *platform.fp8_types())


@pytest.fixture(params=["compiled", "eager"])
def regions(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "compiled":
        line = choose_compile(DEVICE.type == "cpu" or "auto", DEVICE.type)
        if line is None or not line.startswith("compile: on"):
            pytest.skip(str(line))
    yield request.param
    set_compile(False)


@pytest.mark.parametrize("recipe", SCALINGS, indirect=True)
def test_fp8_kernels_pass_the_check_of_a_run(recipe: Fp8Recipe) -> None:
    if DEVICE.type == "cpu" and isinstance(recipe.scaling, Blocks):
        pytest.skip("torch has no kernels of blocks for a CPU")
    check_kernels(recipe, DEVICE)


def test_the_grouped_fp8_kernel_passes_the_check_of_a_run() -> None:
    """A GPU without it is no failure, a wrong result is."""
    platform = detect()
    supported, why = platform.supports("fp8")
    if not supported:
        pytest.skip(why)
    try:
        check_grouped_kernel(platform.fp8_types()[0], DEVICE)
    except UsageError as refused:
        if "fails on this GPU" not in str(refused):
            raise
        pytest.skip(str(refused))


@pytest.mark.parametrize("recipe", SCALINGS, indirect=True)
def test_fp8_linear_layer(regions: str, recipe: Fp8Recipe) -> None:
    """Within the rounding of FP8, for lengths that are no multiples of 16; new weights are quantized again."""
    torch.manual_seed(0)
    outputs, width = 6 * recipe.multiple, 4 * recipe.multiple
    weight: Any = torch.nn.Parameter(torch.randn(outputs, width, device=DEVICE, dtype=torch.bfloat16))
    for length in (37, 64, 131):
        weight.main_grad = torch.zeros(outputs, width, device=DEVICE)
        expected = torch.zeros(outputs, width, device=DEVICE, dtype=torch.float64)
        with fp8_step(keeps_weights=True, gradients_are_zero=True):
            for _ in range(2):
                x = torch.randn(length, 1, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
                grad = torch.randn(length, 1, outputs, device=DEVICE, dtype=torch.bfloat16)
                out = fp8_linear(x, weight, recipe)
                (grad_x,) = torch.autograd.grad(out, x, grad)
                assert error(out, x.detach().double() @ weight.detach().double().t()) < 0.05
                assert error(grad_x, grad.double() @ weight.detach().double()) < 0.08
                expected += grad.double().flatten(0, 1).t() @ x.detach().double().flatten(0, 1)
        assert error(weight.main_grad, expected) < 0.08
        with torch.no_grad():
            weight.copy_(torch.randn_like(weight))


@pytest.mark.parametrize("recipe", SCALINGS, indirect=True)
def test_compiled_quantization_is_compiled_once_for_all_lengths(recipe: Fp8Recipe) -> None:
    line = choose_compile(DEVICE.type == "cpu" or "auto", DEVICE.type)
    if line is None or not line.startswith("compile: on"):
        pytest.skip(str(line))
    try:
        for function in (quantize, quantize_columns, quantize_both):
            compiled = 0
            for number, length in enumerate((48, 37, 64, 51)):
                matrix = torch.randn(length, 128, device=DEVICE, dtype=torch.bfloat16)
                result: Any = function(matrix, recipe.forward, recipe.scaling)
                set_compile(False)
                expected: Any = function(matrix, recipe.forward, recipe.scaling)
                set_compile(True, device=DEVICE.type)
                pairs = zip(result, expected, strict=True) if function is quantize_both else [(result, expected)]
                for ours, theirs in pairs:
                    # Division may be rounded differently: then an element can be the next FP8 number.
                    a, b = (dequantize(item).double() for item in (ours, theirs))
                    assert a.shape == b.shape and error(a, b) < 0.01
                compiled = compiled if number else compiled_versions.total()
            assert compiled_versions.total() == compiled
    finally:
        set_compile(False)
