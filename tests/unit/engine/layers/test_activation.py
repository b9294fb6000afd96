"""Activations against their formulas, and what they save."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from isthmus.engine.layers import activation
from isthmus.engine.layers.activation import Activation, clamped_swiglu, geglu
from isthmus.engine.layers.fused_function import fused
from unit.engine.recorder import Recorder

swiglu = Activation(cast(Any, None), function=activation.swiglu)


@pytest.mark.parametrize(("kind", "approximate"), [(F.gelu, "none"), (F.gelu, "tanh"), (geglu, "tanh"), (F.silu, None)])
def test_other_activations(kind: Any, approximate: str | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 1, 12, dtype=torch.float64)
    root = (2 / torch.pi) ** 0.5
    formula = {
        "none": lambda y: y * (1 + torch.erf(y / 2**0.5)) / 2,
        "tanh": lambda y: y * (1 + torch.tanh(root * (y + 0.044715 * y**3))) / 2,
        None: lambda y: y / (1 + torch.exp(-y)),
    }[approximate]
    expected = formula(x[..., :6]) * x[..., 6:] if kind is geglu else formula(x)
    got = kind(x) if approximate is None else kind(x, approximate=approximate)
    assert torch.allclose(got, expected)


def test_swiglu() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 1, 12, dtype=torch.float64, requires_grad=True)
    assert torch.allclose(swiglu(x), x[..., :6] / (1 + torch.exp(-x[..., :6])) * x[..., 6:])
    assert torch.autograd.gradcheck(swiglu, (x,))


def test_clamped_swiglu_equals_gpt_oss() -> None:
    gate, up = torch.randn(2, 50, 6, generator=torch.Generator().manual_seed(0)) * 8
    theirs = SimpleNamespace(alpha=1.702, limit=7.0)
    expected = GptOssExperts._apply_gate(theirs, torch.stack((gate, up), -1).flatten(-2))  # interleaved
    ours = clamped_swiglu(torch.cat((gate, up), -1))
    assert torch.allclose(ours, expected)
    assert min((gate > 7).sum(), (up > 7).sum(), (up < -7).sum()) > 5


def test_swiglu_does_not_modify_its_input_or_gradient() -> None:
    x, upstream = torch.randn(5, 1, 12), torch.randn(5, 1, 6)
    remaining = x.clone(), upstream.clone()
    x.requires_grad_()
    swiglu(x).backward(upstream)
    assert torch.equal(x, remaining[0]) and torch.equal(upstream, remaining[1])


def test_swiglu_saves_only_its_input() -> None:
    x = torch.randn(64, 1, 128, requires_grad=True)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.data_ptr()), t)[1], lambda t: t):
        swiglu(x)
    assert saved == [x.data_ptr()]
    with Recorder() as seen:
        swiglu(x).sum().backward()
    assert seen.largest(torch.float32) == x.numel()


def test_xielu_and_its_gradients_are_those_of_transformers() -> None:
    from transformers.activations import XIELUActivation

    theirs = XIELUActivation(dtype=torch.float32)
    x = torch.linspace(-4, 4, 41).requires_grad_()
    inputs = (x, theirs.alpha_p, theirs.alpha_n)
    result = fused(activation._xielu)(*inputs, theirs.beta, theirs.eps)
    expected = theirs(x)
    grad = torch.linspace(0.5, 2, 41)
    torch.testing.assert_close(result, expected)
    ours = torch.autograd.grad(result, inputs, grad)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, inputs, grad))


@pytest.mark.parametrize("name", ["relu", "relu2"])
def test_plain_and_gated_relu(name: Any) -> None:
    gate, up = torch.linspace(-2, 2, 9), torch.linspace(1, 3, 9)
    expected = gate.relu() ** (2 if name == "relu2" else 1)
    torch.testing.assert_close(activation.activation_function(name, gated=False)(gate), expected)
    gated = activation.activation_function(name, gated=True)
    torch.testing.assert_close(gated(torch.cat([gate, up])), expected * up)
