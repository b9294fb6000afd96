"""What the next step needs is made while this one runs."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Made = TypeVar("Made")


def prefetched(make: Callable[[int], Made], steps: range) -> Generator[Made, None, None]:
    """``make(step)`` of each step in turn, that of the next one already under way in a thread.

    It is a function of the step alone, so when it is called makes no difference. An error of it is raised where its
    result is asked for. To close the generator waits for the one that is being made, and begins no more.

    Args:
        make: called from one thread at a time, in the order of steps.
        steps: to make something for.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="next-batch") as thread:
        coming = None
        for step in steps:
            ready = thread.submit(make, step) if coming is None else coming
            made = ready.result()
            coming = thread.submit(make, step + steps.step) if step != steps[-1] else None
            yield made
