"""Profiles a step: the share of its wall time by kind of operation."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

# An operation belongs to the first kind with a matching part of its name.
KINDS = (
    ("matmuls", ("::mm", "::addmm", "::bmm", "::baddbmm", "::matmul", "::linear")),
    ("attention", ("attention",)),
    ("elementwise", ("::mul", "::add", "::sub", "::div", "::neg", "::silu", "::sigmoid", "::exp", "::log", "::pow",
                     "::sqrt", "::rsqrt", "::cos", "::sin", "::where", "::lerp", "::reciprocal")),
    ("reductions", ("softmax", "::sum", "::mean", "::amax", "::max", "norm", "::vecdot", "::nonzero", "::any")),
    ("copies and indexing", ("::copy_", "::cat", "::zero_", "::fill_", "::index", "::gather", "::scatter", "::clone",
                             "::embedding", "::split", "::contiguous", "::stack")),
)  # fmt: skip
OPTIMIZER, OUTSIDE = "optimizer", "Python and everything else"


def profile_step(step: Callable[[], Any], optimizer: Any) -> dict[str, Any]:
    """Run ``step`` under torch's profiler and divide its wall time among kinds of operations.

    Args:
        step: one training step.
        optimizer: its ``step`` counts as one kind.

    Returns:
        ``percent`` by kind, ``operations`` with the largest shares, and the wall time of the step, with the profiler's
        overhead.
    """
    update = optimizer.step

    def marked_update(*args: Any, **kwargs: Any) -> Any:
        with record_function(OPTIMIZER):
            return update(*args, **kwargs)

    optimizer.step = marked_update
    try:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            started_s = time.perf_counter()
            step()
            wall_s = time.perf_counter() - started_s
    finally:
        optimizer.step = update
    kinds: dict[str, float] = defaultdict(float)
    operations: dict[str, float] = defaultdict(float)
    for event in profiler.events() or ():
        kind = OPTIMIZER if _inside(event, OPTIMIZER) else _kind(event.name)
        kinds[kind] += event.self_cpu_time_total / 1e6
        operations[f"{kind}: {event.name}"] += event.self_cpu_time_total / 1e6
    kinds[OUTSIDE] += max(0.0, wall_s - sum(kinds.values()))
    largest = sorted(operations.items(), key=lambda item: -item[1])[:24]
    return {
        "wall_s": wall_s,
        "percent": {kind: 100 * s / wall_s for kind, s in sorted(kinds.items(), key=lambda item: -item[1])},
        "operations": {name: 100 * s / wall_s for name, s in largest},
    }


def _kind(name: str) -> str:
    return next((kind for kind, marks in KINDS if any(mark in name for mark in marks)), OUTSIDE)


def _inside(event: Any, scope: str) -> bool:
    """Whether ``event`` is ``scope`` or happened within it."""
    while event is not None:
        if event.name == scope:
            return True
        event = event.cpu_parent
    return False
