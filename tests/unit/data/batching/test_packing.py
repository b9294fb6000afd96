"""Packing keeps every item, respects the capacity and is deterministic."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from isthmus.data.batching.bins import Bins, pack
from isthmus.errors import DataError


def test_items_go_to_the_fullest_bin():
    # 6 and 5 open bins with 4 and 5 left; 4 fits the first exactly, 3 goes to the second, then 2 to the rest of it.
    assert pack([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert pack([], 10) == []
    assert pack([10, 10], 10) == [[0], [1]]


@pytest.mark.parametrize("seed", range(5))
def test_every_item_is_packed_once_within_capacity(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 100) for _ in range(500)]
    bins = pack(lengths, 100)
    assert sorted(item for bin_ in bins for item in bin_) == list(range(500))
    assert max(sum(lengths[k] for k in bin_) for bin_ in bins) <= 100
    assert len(bins) <= 1.1 * sum(lengths) / 100 + 1
    assert bins == pack(lengths, 100)
    flat = Bins.packed(np.array(lengths), 100, first=7)
    assert [flat[k] for k in range(len(flat))] == [[item + 7 for item in bin_] for bin_ in bins]
    assert 100 in lengths


def test_too_long_item_is_reported():
    with pytest.raises(DataError, match="sample 1 has 11 tokens, the sequence length is 10"):
        pack([3, 11], 10)


@pytest.mark.slow
def test_fifty_thousand_items_take_about_a_second():
    rng = random.Random(0)
    lengths = [rng.randint(1, 2048) for _ in range(50_000)]
    start = time.process_time()
    bins = pack(lengths, 2048)
    assert time.process_time() - start < 10
    assert sum(lengths) / (2048 * len(bins)) > 0.98
