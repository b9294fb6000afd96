"""Named trace regions, shown by the heartbeat and in profiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function

_regions: list[str] = []


@contextmanager
def trace_region(name: str) -> Iterator[None]:
    """Regions nest; they appear in profiles."""
    _regions.append(name)
    try:
        if torch.autograd.profiler._is_profiler_enabled:
            with record_function(name):
                yield
        else:
            yield
    finally:
        _regions.pop()


def current_region() -> str:
    """The open regions, outermost first: ``step 12: optimizer``."""
    return ": ".join(_regions)
