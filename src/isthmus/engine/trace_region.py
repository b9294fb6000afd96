"""What this rank is doing: told to its peers when they wait for it, and a range in a profile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function

_doing: list[str] = []


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Be in ``name`` ("optimizer", "step 12") until the block ends; phases lie within one another."""
    _doing.append(name)
    try:
        if torch.autograd.profiler._is_profiler_enabled:
            with record_function(name):
                yield
        else:
            yield
    finally:
        _doing.pop()


def doing() -> str:
    """The phases that this rank is in, outermost first: ``step 12: optimizer``."""
    return ": ".join(_doing)
