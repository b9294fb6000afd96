"""A mix is exact in its shares at every place, and a function of the place alone."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from isthmus.data.store.mixture import MixtureSchedule, SequenceOrder


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
