from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isthmus.engine.linear import matmul, packed_weights
from isthmus.engine.linear.packed_weights import MOST_ROWS, PackedWeights
from isthmus.platforms.cpu import has_bf16_matmuls

pytestmark = pytest.mark.skipif(packed_weights.PACK_WEIGHT is None, reason="this torch has no oneDNN")


@pytest.fixture
def packed_products(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Products of packed weights."""
    products: list[Tensor] = []
    multiply = matmul.PACKED_LINEAR

    def recorded(*arguments: object) -> Tensor:
        products.append(multiply(*arguments))
        return products[-1]

    monkeypatch.setattr(matmul, "PACKED_LINEAR", recorded)
    return products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 96), (3, 1, 96), (MOST_ROWS, 1, 96)])
def test_product_is_that_of_the_weight(
    packed_products: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if dtype == torch.bfloat16 and not has_bf16_matmuls():
        pytest.skip("this CPU has no bfloat16 instructions")
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(70, 96, dtype=dtype)
    with PackedWeights([weight], rows=4).used():
        product = matmul.matmul(x, weight.t())
    torch.testing.assert_close(product, x @ weight.t())
    assert len(packed_products) == 1


def test_product_of_some_rows_of_a_weight(packed_products: list[Tensor]) -> None:
    x, weight, out = torch.randn(4, 32), torch.randn(50, 32), torch.empty(4, 48)
    with PackedWeights([weight[:48]], rows=4).used():
        matmul.matmul(x, weight[:48].t(), out=out)
        whole = matmul.matmul(x, weight.t())
    torch.testing.assert_close(out, x @ weight[:48].t())
    torch.testing.assert_close(whole, x @ weight.t())
    assert len(packed_products) == 1


def test_single_row_uses_the_weight(packed_products: list[Tensor]) -> None:
    x, weight = torch.randn(1, 1, 32), torch.randn(16, 32)
    with PackedWeights([weight], rows=4).used():
        matmul.matmul(x, weight.t())
    assert not packed_products


def test_weight_is_used_outside_of_the_context(packed_products: list[Tensor]) -> None:
    x, weight = torch.randn(4, 32), torch.randn(16, 32)
    packed = PackedWeights([weight], rows=4)
    with pytest.raises(ZeroDivisionError), packed.used():
        raise ZeroDivisionError
    weight.zero_()
    assert not matmul.matmul(x, weight.t()).any()
    assert not packed_products


@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 4), (torch.float32, 1), (torch.float32, MOST_ROWS + 1)])
def test_weights_that_are_not_packed(
    packed_products: list[Tensor], dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "has_bf16_matmuls", lambda: False)
    x, weight = torch.randn(4, 32, dtype=dtype), torch.randn(16, 32, dtype=dtype)
    with PackedWeights([weight], rows=rows).used():
        matmul.matmul(x, weight.t())
    assert not packed_products
