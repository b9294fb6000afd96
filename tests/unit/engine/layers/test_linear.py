"""Gradients of linear layers in their buffers."""

from __future__ import annotations

import pytest
import torch

from isthmus.engine.layers import matmul
from isthmus.engine.layers.linear import _LinearIntoMainGrad
from isthmus.engine.parallel.tensor_parallel import NO_EXCHANGE
from unit.engine.recorder import Recorder


def test_the_gradient_buffer_is_used_with_hooks_on_saved_tensors() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    weight.main_grad = torch.zeros(3, 4)
    x = torch.randn(5, 1, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        out = _LinearIntoMainGrad.apply(x, weight, NO_EXCHANGE)
    out.sum().backward()
    assert torch.allclose(weight.main_grad, x.detach().sum((0, 1)).expand(3, 4))
    assert weight.grad is None and weight.grad_added_to_main_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matmuls_are_added_in_blocks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "BLOCK_ELEMENTS", 12)
    torch.manual_seed(0)
    a, b, into = torch.randn(7, 5).to(dtype), torch.randn(5, 4).to(dtype), torch.ones(7, 4)
    wanted = 1 + a.double() @ b.double()
    with Recorder() as seen:
        matmul.add_matmul(into, a, b)
    assert torch.allclose(into.double(), wanted, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.05)
    assert seen.largest(dtype) <= 12
