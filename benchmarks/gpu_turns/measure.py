"""The row of a contestant: medians over the timed steps, FLOPs and memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.platforms.base import Platform

CONVENTION = (
    "model FLOPs without recomputation, backward twice the forward; attention causal and within samples; logits of "
    "loss tokens only (isthmus.train.flops)"
)


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step."""

    time_s: float
    tokens: int
    """Without padding."""
    flops: float
    loss: float


def row(
    steps: Sequence[Step], platform: Platform, precision: str, startup_s: float, memory_gib: float
) -> dict[str, Any]:
    """The result of a turn; ``steps`` are the timed ones."""
    seconds = [step.time_s for step in steps]
    tflops = sum(step.flops for step in steps) / sum(seconds) / 1e12
    peak = platform.peak_tflops(precision)
    return {
        "tokens_per_s": sum(step.tokens for step in steps) / sum(seconds),
        "step_time_s": statistics.median(seconds),
        "step_time_s_steps": seconds,
        "tflops": tflops,
        "mfu": None if peak is None else tflops / peak,
        "peak_tflops": peak,
        "memory_gib": memory_gib,
        "startup_s": startup_s,
        "precision": precision,
    }
