"""Norms against their formulas."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.engine.layers.norm import LayerNorm, ProjectionNorm, RMSNorm


def config(dtype: torch.dtype, *, sequence_parallel: bool = False, zero_centered: bool = False) -> Any:
    return SimpleNamespace(
        params_dtype=dtype, sequence_parallel=sequence_parallel, layernorm_zero_centered_gamma=zero_centered
    )


def norm(kind: Any, size: int, dtype: torch.dtype, eps: float) -> Any:
    module = kind(config(dtype), size, eps)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("shape", [(6, 1, 16), (6, 1, 4, 16)])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm(shape: tuple[int, ...], eps: float) -> None:
    module = norm(RMSNorm, 16, torch.float32, eps)
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    upstream = torch.randn(shape)
    out = module(x)
    expected = rms(x, module.weight, eps)
    assert torch.allclose(out, expected, atol=1e-6)
    got = torch.autograd.grad(out, (x, module.weight), upstream)
    for mine, reference in zip(got, torch.autograd.grad(expected, (x, module.weight), upstream), strict=True):
        assert torch.allclose(mine, reference, atol=1e-5)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_the_input_beside_the_norm_has_the_sum_of_both_gradients(kind: Any) -> None:
    """Bit by bit what autograd adds up for an input that is used twice, in one kernel."""
    module = norm(kind, 16, torch.float32, 1e-5)
    x = torch.randn(6, 1, 16, requires_grad=True)
    upstream = torch.randn(2, 6, 1, 16)
    same, normed = module(x, with_input=True)
    assert same.data_ptr() == x.data_ptr() and torch.equal(normed, module(x))
    (got,) = torch.autograd.grad((same, normed), x, upstream.unbind())
    (expected,) = torch.autograd.grad((x * 1, module(x)), x, upstream.unbind())
    assert torch.equal(got, expected)
    with torch.no_grad():
        assert all(map(torch.equal, module(x, with_input=True), (x, normed)))


def test_rms_norm_gradient_in_float64() -> None:
    module = norm(RMSNorm, 8, torch.float64, 1e-3)
    x = torch.randn(3, 1, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,))
    assert torch.autograd.gradcheck(
        lambda weight: torch.func.functional_call(module, {"weight": weight}, (x.detach(),)),
        (module.weight.detach().clone().requires_grad_(),),
    )


def test_rms_norm_sums_in_float32() -> None:
    module = norm(RMSNorm, 4096, torch.bfloat16, 1e-6)
    torch.manual_seed(0)
    x = torch.randn(4, 1, 4096).bfloat16()
    expected = rms(x.double(), module.weight.double(), 1e-6)
    assert module(x).dtype == torch.bfloat16
    assert ((module(x).double() - expected).abs() <= expected.abs() * 2**-8 + 1e-6).all()  # one rounding, at the end


def test_rms_norm_of_zeros_has_a_gradient() -> None:
    module = norm(RMSNorm, 16, torch.float32, 1e-6)
    x = torch.zeros(2, 1, 16, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_layer_norm() -> None:
    module = norm(partial(LayerNorm, bias=True), 16, torch.float32, 1e-3)
    x = torch.randn(6, 1, 16)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * module.weight + module.bias
    assert torch.allclose(module(x), expected, atol=1e-5)


def test_layer_norm_without_a_bias() -> None:
    module = LayerNorm(config(torch.float32), 16, 1e-3, bias=False)
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    x = torch.randn(6, 1, 16)
    centred = x - x.mean(-1, keepdim=True)
    assert torch.allclose(module(x), centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt(), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_centred_norm_adds_one_before_it_rounds(dtype: torch.dtype) -> None:
    module = RMSNorm(config(dtype, zero_centered=True), 16, 1e-6)
    torch.manual_seed(0)
    with torch.no_grad():
        module.weight.normal_(std=0.01)
    x = torch.randn(5, 16, dtype=dtype)
    exact = rms(x.double(), 1 + module.weight.double(), 1e-6)
    assert torch.allclose(module(x).double(), exact, rtol=1e-6 if dtype == torch.float32 else 2**-8, atol=1e-6)
    module(x).sum().backward()
    assert module.weight.grad is not None and module.weight.grad.dtype == dtype


def test_projection_norm_spans_all_heads() -> None:
    torch.manual_seed(0)
    module = ProjectionNorm(config(torch.float32), 6, 4, 1e-3, rank=0, ranks=1)
    with torch.no_grad():
        module.weight.normal_()
    x = torch.randn(5, 2, 3, 4, requires_grad=True)
    assert torch.allclose(module(x).flatten(1), rms(x.flatten(1), module.weight, 1e-3), atol=1e-6)
    assert torch.autograd.gradcheck(module.double(), (x.detach().double().requires_grad_(),))


@pytest.mark.parametrize("kind", [RMSNorm, partial(LayerNorm, bias=True)])
@pytest.mark.parametrize("spread", [False, True])
def test_norms_mark_gradients_to_be_summed(kind: Any, spread: bool) -> None:
    module = kind(config(torch.float32, sequence_parallel=spread), 16)
    assert all(parameter.sequence_parallel == spread for parameter in module.parameters())
