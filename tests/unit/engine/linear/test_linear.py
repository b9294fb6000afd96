"""Gradients of linear layers in their buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.engine.linear import input_exchange as tensor_parallel
from isthmus.engine.linear import linear, matmul
from isthmus.engine.linear.fp8_linear import Fp8Recipe, fp8_linear
from isthmus.engine.linear.input_exchange import NO_EXCHANGE, InputExchange
from isthmus.engine.linear.linear import _fused_linear, _LinearIntoMainGrad
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


@pytest.mark.parametrize("fp8", [False, True])
def test_a_frozen_weight_saves_no_input_and_has_no_gradient(fp8: bool) -> None:
    recipe = Fp8Recipe("tensorwise", torch.float8_e4m3fn, torch.float8_e5m2)
    gradients = []
    for trained in (True, False):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(16, 32), requires_grad=trained)
        weight.main_grad = torch.zeros(16, 32)
        x = torch.randn(5, 1, 32, requires_grad=True)
        saved: list[Tensor] = []

        def save(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            out = fp8_linear(x, weight, recipe) if fp8 else _fused_linear(x, weight)
        out.square().sum().backward()
        assert any(tensor.shape == x.shape for tensor in saved) == trained
        assert weight.main_grad.any() == trained and weight.grad is None
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matmuls_are_added_in_blocks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "BLOCK_ELEMENTS", 12)
    torch.manual_seed(0)
    a, b, into = torch.randn(7, 5).to(dtype), torch.randn(5, 4).to(dtype), torch.ones(7, 4)
    expected = 1 + a.double() @ b.double()
    with Recorder() as seen:
        matmul.add_matmul(into, a, b)
    assert torch.allclose(into.double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.05)
    assert seen.largest(dtype) <= 12


@pytest.mark.parametrize("shared", ["allreduce_dgrad", "sequence_parallel"])
def test_matmuls_overlap_communication(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with equal values: the gather overlaps the input's gradient, the sum overlaps the weight's."""
    order: list[str] = []

    class Work:
        def __init__(self, name: str) -> None:
            order.append(name)
            self.name = name

        def wait(self) -> None:
            order.append(f"wait {self.name}")

    def gather(out: Tensor, x: Tensor, **_options: Any) -> Work:
        out.copy_(torch.cat((x, x)))
        return Work("gather")

    def scatter(out: Tensor, x: Tensor, **_options: Any) -> Work:
        out.copy_(2 * x[: out.size(0)])
        return Work("sum")

    def reduce(x: Tensor, **_options: Any) -> Work:
        x.mul_(2)
        return Work("sum")

    def logged(name: str) -> Any:
        plain = getattr(matmul, name)

        def call(*args: Any) -> Any:
            order.append(name)
            return plain(*args)

        return call

    for name, stand_in in (
        ("all_gather_into_tensor", gather),
        ("reduce_scatter_tensor", scatter),
        ("all_reduce", reduce),
    ):
        monkeypatch.setattr(torch.distributed, name, stand_in)
    monkeypatch.setattr(tensor_parallel, "matmul", logged("matmul"))
    monkeypatch.setattr(linear, "add_matmul", logged("add_matmul"))
    group: Any = type("Group", (), {"size": lambda _self: 2})()
    weight: Any = torch.nn.Parameter(torch.randn(3, 4))
    weight.main_grad = torch.ones(3, 4)
    x = torch.randn(5, 1, 4, requires_grad=True)
    out = linear._fused_linear(x, weight, InputExchange(group, **{shared: True}))
    assert out is not None
    upstream = torch.randn(5, 1, 3)
    upstream = torch.cat((upstream, upstream)) if shared == "sequence_parallel" else upstream
    order.clear()
    out.backward(upstream)
    gathered = shared == "sequence_parallel"
    assert order == [
        *["gather"] * gathered, "matmul", "sum", *["wait gather"] * gathered, "add_matmul", "wait sum",
    ]  # fmt: skip
    full = torch.cat((x, x)) if gathered else x
    assert torch.allclose(weight.main_grad - 1, upstream[:, 0].t() @ full[:, 0], atol=1e-5)
    assert x.grad is not None and torch.allclose(x.grad, 2 * upstream[:5] @ weight, atol=1e-5)
