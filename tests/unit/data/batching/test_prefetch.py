"""The next item is computed while the last one is in use."""

from __future__ import annotations

import threading

import pytest

from isthmus.data.batching.batches import prefetched
from isthmus.errors import DataError


def test_items_in_order_and_the_next_one_early():
    built: list[tuple[int, str]] = []

    def make(step: int) -> int:
        built.append((step, threading.current_thread().name))
        return step * step

    assert list(prefetched(make, range(3, 7))) == [9, 16, 25, 36] and list(prefetched(make, range(2, 2))) == []
    assert [step for step, _ in built] == [3, 4, 5, 6]
    built.clear()
    batches = prefetched(make, range(3, 7))
    assert next(batches) == 9
    batches.close()  # waits for what is under way and begins nothing
    assert [step for step, _ in built] == [3, 4]
    assert not [thread for thread in threading.enumerate() if thread.name in {name for _, name in built}]


def test_an_error_is_raised_at_its_step():
    def make(step: int) -> int:
        if step == 2:
            raise DataError("bad")
        return step

    batches = prefetched(make, range(5))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(DataError, match="bad"):
        next(batches)
