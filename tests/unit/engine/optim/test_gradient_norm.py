"""The gradient norm does not depend on the size of tensors, nor on how they are sharded."""

from __future__ import annotations

import pytest
import torch

from isthmus.engine.optim.update import _BLOCK, _SHORT, sum_of_squares


def gradient(elements: int) -> torch.Tensor:
    """Most elements are small, as in an embedding."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(elements, generator=generator) * torch.rand(elements, generator=generator) ** 4


@pytest.mark.parametrize("elements", [1, _BLOCK + 1, _SHORT, _SHORT + 1, _SHORT + _BLOCK, 2_000_003])
def test_sum_of_squares_is_exact(elements: int) -> None:
    grad = gradient(elements)
    exact = float(grad.double().square().sum())
    assert float(sum_of_squares([grad])) == pytest.approx(exact, rel=2e-7)


def test_shards_have_the_sum_of_the_whole(elements: int = 2_000_000) -> None:
    grad = gradient(elements).view(1000, -1)
    full = float(sum_of_squares([grad]))
    for dimension, parts in ((0, 2), (1, 2), (0, 7)):
        shards = [float(sum_of_squares([part])) for part in grad.chunk(parts, dimension)]
        assert sum(shards) == pytest.approx(full, rel=1e-7)


def test_many_tensors_and_an_empty_one() -> None:
    grads = [gradient(elements) for elements in (3, 50_000, 0, 70_000)]
    exact = sum(float(grad.double().square().sum()) for grad in grads)
    assert float(sum_of_squares(grads)) == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_remains(value: float) -> None:
    grad = gradient(50_000)
    grad[1234] = value
    assert not sum_of_squares([grad, gradient(10)]).isfinite()
