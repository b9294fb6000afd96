"""Products by either library: the same values, of whatever layout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.engine import products
from isthmus.engine.linear import _LinearIntoMainGrad, _product_alone
from isthmus.engine.products import product

ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


@pytest.fixture(params=["onednn", "torch"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what oneDNN was asked for, which this torch must have."""
    asked: list[tuple[int, ...]] = []
    if request.param == "onednn" and (ONEDNN is None or not torch.backends.mkldnn.is_available()):
        pytest.skip("this torch has no oneDNN")

    def linear(x: Tensor, weight: Tensor, *how: Any) -> Any:
        asked.append((*x.shape, weight.size(0)))
        assert ONEDNN is not None
        return ONEDNN(x, weight, *how)

    monkeypatch.setattr(products, "_onednn_linear", lambda: linear if request.param == "onednn" else None)
    return asked


def used(library: list[tuple[int, ...]], request: pytest.FixtureRequest) -> bool:
    return bool(library) or "torch" in request.node.callspec.id


def close(got: Tensor, a: Tensor, b: Tensor) -> bool:
    return got.dtype == a.dtype and torch.allclose(got.double(), a.double() @ b.double(), rtol=0, atol=1e-4)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("rows", [(1,), (7,), (33, 1), (3, 2)])
def test_of_any_layout(library: list[tuple[int, ...]], rows: tuple[int, ...], request: pytest.FixtureRequest) -> None:
    a, b = drawn(*rows, 20), drawn(20, 12)
    transposed, wide = drawn(12, 20).t(), drawn(20, 30)
    assert close(product(a, b), a, b) and product(a, b).shape == (*rows, 12)
    assert close(product(a, transposed), a, transposed)
    assert close(product(a, wide[:, 5:17]), a, wide[:, 5:17])
    turned = drawn(20, *rows).movedim(0, -1)
    assert close(product(turned, b), turned, b)
    assert used(library, request)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_and_nothing_at_all_are_left_to_torch(library: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    a, b = drawn(5, 4).to(dtype), drawn(4, 3).to(dtype)
    assert torch.equal(product(a, b), a @ b)
    assert product(drawn(0, 4), drawn(4, 3)).shape == (0, 3)
    assert not library


def test_a_linear_layer_and_its_gradients(library: list[tuple[int, ...]], request: pytest.FixtureRequest) -> None:
    x, weight = drawn(9, 1, 8).requires_grad_(), torch.nn.Parameter(drawn(6, 8))
    weight.main_grad = torch.ones(6, 8)  # type: ignore[attr-defined]
    upstream = drawn(9, 1, 6)
    out = _LinearIntoMainGrad.apply(x, weight)
    out.backward(upstream)
    assert close(out, x.detach(), weight.detach().t())
    assert x.grad is not None and close(x.grad, upstream, weight.detach())
    assert close(weight.main_grad - 1, upstream[:, 0].t(), x.detach()[:, 0])  # type: ignore[attr-defined]
    assert used(library, request)


def test_with_and_without_gradients_a_layer_says_the_same(library: list[tuple[int, ...]]) -> None:
    """As a recomputed layer must: its first pass keeps no gradients."""
    x, weight = drawn(9, 1, 8), torch.nn.Parameter(drawn(6, 8))
    weight.main_grad = torch.zeros(6, 8)  # type: ignore[attr-defined]
    with torch.no_grad():
        first = _product_alone(x, weight)
    second = _product_alone(x, weight)
    assert first is not None and second is not None and torch.equal(first, second)


@pytest.mark.parametrize("asked", [{"bias": torch.zeros(6)}, {"allreduce_dgrad": True}, {"sequence_parallel": True}])
def test_what_needs_more_than_a_product_is_megatron_s(asked: dict[str, Any]) -> None:
    weight: Any = SimpleNamespace(main_grad=torch.zeros(6, 8))
    with torch.no_grad():
        assert _product_alone(drawn(9, 1, 8), weight, asked) is None
