from __future__ import annotations

from itertools import pairwise

from isthmus.train.memory_warnings import memory_warning


def test_full_memory_is_reported_at_powers_of_two() -> None:
    counts = [0, 0, 1, 1, 2, 3, 7, 8, 100, 101]
    results = [count for before, count in pairwise(counts) if memory_warning(before, count)]
    assert results == [1, 2, 7, 8, 100]
    assert "was full 7 times" in str(memory_warning(3, 7))
