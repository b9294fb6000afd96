"""Which blocks of a tensor a range of its elements consists of."""

from __future__ import annotations

import pytest
import torch

from isthmus.engine.checkpoint.optimizer_state import blocks


@pytest.mark.parametrize("shape", [(7,), (3, 4), (4, 1), (2, 3, 2)])
def test_blocks_contain_exactly_the_elements_in_order(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(numbers.numel() + 1):
        for end in range(start, numbers.numel() + 1):
            results = list(blocks(shape, start, end))
            parts = [
                numbers[tuple(slice(at, at + length) for at, length in zip(corner, size, strict=True))].flatten()
                for corner, size in results
            ]
            assert torch.cat([numbers[:0].flatten(), *parts]).tolist() == list(range(start, end))
            assert len(results) <= 2 * len(shape) - 1
