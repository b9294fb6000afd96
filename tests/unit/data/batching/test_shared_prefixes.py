"""Which tokens of a packed sequence are computed once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isthmus.data.batching.shared_prefixes import SharedPrefixes, find_shared_prefixes


def found(samples: list[list[int]], *, padding: int = 0, multiple: int = 1) -> SharedPrefixes | None:
    total = sum(map(len, samples)) + padding
    return find_shared_prefixes([np.array(sample) for sample in samples], total, multiple)


def test_rows_have_the_tokens_of_each_sample() -> None:
    samples = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 5, 6], [7, 8]]
    shared = found(samples, padding=2)
    assert shared is not None
    assert shared.computed == ((0, 4), (6, 7), (10, 15))
    assert shared.sources == ((0, 4), (0, 2), (4, 5), (0, 2), (4, 10))
    tokens = torch.tensor([token for sample in samples for token in sample] + [0, 0])
    assert shared.select(tokens).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0, 0]
    assert shared.select(tokens)[shared.rows].equal(tokens)
    assert shared.num_rows == 10


@pytest.mark.parametrize("samples", [[[1, 2]], [[1, 2], [2, 1]], [[1, 2], [3], [1, 2]], []])
def test_only_the_sample_before_is_compared(samples: list[list[int]]) -> None:
    assert found(samples, padding=2) is None


def test_tokens_with_other_experts_are_not_shared() -> None:
    samples = [np.array([1, 2, 3, 4])] * 3
    experts = [np.zeros((4, 2, 2), np.uint8) for _ in samples]
    experts[1][2, 1, 0] = 5
    experts[2][2, 1, 0] = 5
    shared = find_shared_prefixes(samples, 12, 1, experts)
    assert shared is not None and shared.computed == ((0, 4), (6, 8))
    assert shared.sources == ((0, 4), (0, 2), (4, 6), (0, 2), (4, 6))
    experts[1][0] = 1
    assert find_shared_prefixes(samples[:2], 8, 1, experts[:2]) is None


def test_the_number_of_rows_is_a_multiple() -> None:
    shared = found([[1, 2, 3], [1, 2, 3], [1, 2, 4]], padding=3, multiple=4)
    assert shared is not None and shared.num_rows == 8  # 7 without a multiple
    assert found([[1, 2, 3], [1, 2, 4]], padding=2, multiple=4) is None


def test_equal_samples_have_the_same_rows() -> None:
    shared = found([[5, 6], [5, 6]])
    assert shared is not None and shared.rows.tolist() == [0, 1, 0, 1]
