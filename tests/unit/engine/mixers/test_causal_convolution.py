"""The convolution of packed samples equals torch's convolution of each sample."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from isthmus.engine.mixers.causal_convolution import causal_convolution

LENGTHS = (5, 1, 2, 9, 3)


def of_each_sample(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: tuple[int, ...], activated: bool) -> Tensor:
    channels, _, taps = weight.shape
    results = [
        F.conv1d(F.pad(sample.t(), (taps - 1, 0)), weight, bias, groups=channels).t() for sample in x.split(lengths)
    ]
    return F.silu(torch.cat(results)) if activated else torch.cat(results)


@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("taps", "lengths"), [(4, LENGTHS), (3, LENGTHS), (1, LENGTHS), (4, (2,)), (4, (1,))])
def test_values_and_gradients(taps: int, lengths: tuple[int, ...], has_bias: bool, activated: bool) -> None:
    torch.manual_seed(0)
    tokens, channels = sum(lengths), 6
    x = torch.randn(tokens, channels, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(channels, 1, taps, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(channels, dtype=torch.float64, requires_grad=True) if has_bias else None
    upstream = torch.randn(tokens, channels, dtype=torch.float64)
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
    expected = of_each_sample(x, weight, bias, lengths, activated)
    result = causal_convolution(x, weight, bias, lengths, activated=activated)
    assert torch.allclose(result, expected, rtol=1e-12, atol=1e-12)
    gradients = zip(
        torch.autograd.grad(result, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    )
    assert all(torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12) for ours, theirs in gradients)


def test_a_sample_does_not_depend_on_a_broken_one_before_it() -> None:
    x = torch.ones(6, 2)
    x[:3] = torch.nan
    out = causal_convolution(x, torch.ones(2, 1, 4), None, (3, 3))
    assert out[3:].tolist() == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_bf16_is_rounded_once() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(50, 8, dtype=torch.bfloat16), torch.randn(8, 1, 4, dtype=torch.bfloat16)
    expected = causal_convolution(x.float(), weight.float(), None, (50,), activated=True).bfloat16()
    assert torch.equal(causal_convolution(x, weight, None, (50,), activated=True), expected)


def test_a_frozen_weight_has_no_gradient() -> None:
    x = torch.randn(4, 2, requires_grad=True)
    weight, bias = torch.randn(2, 1, 3), torch.randn(2)
    causal_convolution(x, weight, bias, (4,)).sum().backward()
    assert x.grad is not None and weight.grad is None and bias.grad is None
