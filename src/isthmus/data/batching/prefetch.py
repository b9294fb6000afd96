"""Prepares the batches of the next step during the current step."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def prefetched(make: Callable[[int], Item], steps: range) -> Generator[Item, None, None]:
    """Yield ``make(step)`` for each step; a thread computes the next one.

    An error of ``make`` is raised where its result is used. Closing the generator waits for the current call.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="next-batch") as thread:
        following = None
        for step in steps:
            item = (thread.submit(make, step) if following is None else following).result()
            following = thread.submit(make, step + steps.step) if step != steps[-1] else None
            yield item
