"""A mix is exact in its shares at every place, and a function of the place alone."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from isthmus.data.store import mixture
from isthmus.data.store.mixture import MixtureSchedule, SequenceOrder, permuted


@pytest.mark.parametrize("weights", [[1.0], [1, 1], [7, 3], [0.5, 0.3, 0.2], [5, 1, 1, 1, 1, 0.001], [1e-6, 1]])
def test_mixture_is_the_webster_apportionment(weights):
    """The set with the largest weight / (taken + 1/2) is next: the same as the earliest time."""
    turns, exact = MixtureSchedule(weights), [Fraction(weight / sum(weights)) for weight in weights]
    consumed = [0] * len(weights)
    for place in range(300):
        chosen, number = turns.at(place)
        best = max(share / (2 * count + 1) for share, count in zip(exact, consumed, strict=True))
        assert float(exact[chosen] / (2 * consumed[chosen] + 1)) == pytest.approx(float(best), rel=1e-12)
        assert number == consumed[chosen]
        assert MixtureSchedule(weights).consumed(place) == consumed
        consumed[chosen] += 1


def test_mixture_shares_at_large_positions():
    turns = MixtureSchedule([0.6, 0.3, 0.1])
    for places in (10_000_000_000, 4096 * 1000, 4095):
        assert all(
            abs(count - share * places) <= 1
            for count, share in zip(turns.consumed(places), (0.6, 0.3, 0.1), strict=True)
        )
        before = MixtureSchedule([0.6, 0.3, 0.1]).consumed(places)
        for place in range(places, places + 20):
            chosen, number = turns.at(place)
            assert number == before[chosen]
            before[chosen] += 1


def test_each_set_has_separate_epochs():
    order = SequenceOrder([3, 50], [1, 1], seed=4, shuffle=True)
    places = [order.at(k) for k in range(40)]
    assert places == [SequenceOrder([3, 50], [1, 1], seed=4, shuffle=True).at(k) for k in range(40)]
    small, large = [p for p in places if p < 3], [p for p in places if p >= 3]
    assert [sorted(small[at : at + 3]) for at in range(0, 18, 3)] == [[0, 1, 2]] * 6
    assert len({tuple(small[at : at + 3]) for at in range(0, 18, 3)}) > 1
    assert max(Counter(large).values()) == 1
    assert order.epochs(40) == [20 / 3, 20 / 50]
    assert [SequenceOrder([3, 50], [1, 1], seed=5, shuffle=True).at(k) for k in range(40)] != places
    assert [order.at(k) for k in reversed(range(40))] == places[::-1]


@pytest.mark.slow
def test_order_of_a_large_set_is_computed(monkeypatch):
    """It is a permutation in each epoch, from the seed, whichever positions are asked for first."""
    monkeypatch.setattr(mixture, "COMPUTED_FROM", 1000)
    monkeypatch.setattr(mixture, "_BLOCK", 64)
    counts = [1000, 999, 2049]
    order = SequenceOrder(counts, [1, 1, 1], seed=4, shuffle=True)
    assert order.computed == [True, False, True]
    for chosen, count in enumerate(counts):
        epochs = [order.permutation(chosen, epoch) for epoch in range(3)]
        assert all(sorted(epoch.tolist()) == list(range(count)) for epoch in epochs)
        assert len({tuple(epoch[:50]) for epoch in epochs}) == 3
        assert abs(np.corrcoef(epochs[0], np.arange(count))[0, 1]) < 0.1
        assert abs(np.corrcoef(epochs[0], epochs[1])[0, 1]) < 0.1
    single = SequenceOrder([4097], [1], seed=4, shuffle=True)
    two_epochs = np.concatenate([single.permutation(0, 0), single.permutation(0, 1)])
    assert [single.at(k) for k in range(0, len(two_epochs), 97)] == two_epochs[::97].tolist()
    other = SequenceOrder([4097], [1], seed=5, shuffle=True)
    assert other.permutation(0, 0).tolist() != single.permutation(0, 0).tolist()
    in_memory = SequenceOrder([4097], [1], seed=4, shuffle=True, computed=False)
    monkeypatch.undo()
    assert in_memory.permutation(0, 0).tolist() == SequenceOrder([4097], [1], seed=4, shuffle=True).permutation(0, 0).tolist()  # fmt: skip  # noqa: E501
    assert SequenceOrder([4097], [1], seed=4, shuffle=False).permutation(0, 0).tolist() == list(range(4097))


def test_computed_orders_do_not_change():
    """Checkpoints of large sets depend on these numbers."""
    keys = np.random.Philox(key=np.array([7, 0], dtype=np.uint64)).random_raw(8)
    positions = np.array([0, 1, 2, 10**9 - 1], dtype=np.uint64)
    assert permuted(positions, 10**9, keys).tolist() == [964781743, 116751048, 709899311, 148384017]
    assert sorted(permuted(np.arange(37, dtype=np.uint64), 37, keys).tolist()) == list(range(37))
    assert permuted(np.zeros(1, np.uint64), 1, keys).tolist() == [0]


def test_computed_order_is_spread_evenly():
    """The first positions of 10^9 fall into all sixteenths of the set equally."""
    keys = np.random.Philox(key=np.array([3, 1], dtype=np.uint64)).random_raw(8)
    images = permuted(np.arange(1 << 16, dtype=np.uint64), 10**9, keys)
    shares = np.bincount((images // np.uint64(62_500_000)).astype(np.int64), minlength=16)
    assert abs(shares - 4096).max() < 5 * 64 and len(np.unique(images)) == 1 << 16
