"""Speed of a contestant, and whether two contestants trained the same, from their rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpu_turns.rows import append, of_kind

if TYPE_CHECKING:
    from gpu_turns.cases import Turn
    from isthmus.platforms.base import Platform

CONVENTION = (
    "model FLOPs without recomputation, backward twice the forward; attention causal and within samples; logits of "
    "loss tokens only (isthmus.train.flops)"
)
COMPARED_STEPS = 11
LOSS_TOLERANCE = {"bf16": 2e-3, "fp8": 1e-2}
"""Relative difference of the loss of a step from that of Isthmus in bf16."""
NORM_TOLERANCE = {"bf16": 1e-2, "fp8": 5e-2}
"""The same of the gradient norm of the first step, which has the same weights."""


def append_step(time_s: float, tokens: int, flops: float, loss: float, grad_norm: float, memory_gib: float) -> None:
    """``tokens`` are without padding; ``memory_gib`` is the peak."""
    append(
        "step", time_s=time_s, tokens=tokens, flops=flops, loss=loss, grad_norm=grad_norm, memory_gib=memory_gib
    )  # fmt: skip


def append_run(platform: Platform, turn: Turn, **facts: Any) -> None:
    """Facts about a run, before its first step."""
    peak = platform.peak_tflops(turn.precision)
    steps = {"warmup_steps": turn.warmup_steps, "timed_steps": turn.timed_steps}
    append("fact", precision=turn.precision, peak_tflops=peak, **steps, **facts)


def speed(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """Medians over the timed steps that have ended; None if there are none."""
    steps, facts = of_kind(part["rows"], "step"), of_kind(part["rows"], "fact")
    if len(steps) <= (warmup_steps := facts[0]["warmup_steps"] if steps else 0):
        return None
    timed = steps[warmup_steps : warmup_steps + facts[0]["timed_steps"]]  # profiled ones follow
    seconds = [step["time_s"] for step in timed]
    tflops = sum(step["flops"] for step in timed) / sum(seconds) / 1e12
    peak = facts[0]["peak_tflops"]
    return {
        "steps": len(timed),
        "tokens_per_s": sum(step["tokens"] for step in timed) / sum(seconds),
        "step_time_s": statistics.median(seconds),
        "tflops": tflops,
        "mfu": None if peak is None else tflops / peak,
        "memory_gib": timed[-1]["memory_gib"],
        "startup_s": steps[0]["at_s"],
    }


def difference(mine: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], precision: str) -> str | None:
    """Where the steps of another contestant differ from those of Isthmus; None if they trained the same."""
    if min(len(mine), len(others)) < COMPARED_STEPS:
        return f"Isthmus has {len(mine)} steps and it has {len(others)}, of {COMPARED_STEPS} to compare"
    norms = [steps[0]["grad_norm"] for steps in (mine, others)]
    if not abs(norms[1] / norms[0] - 1) <= NORM_TOLERANCE[precision]:
        return f"first gradient norm {norms[1]:.5g}, Isthmus has {norms[0]:.5g}"
    for number, (a, b) in enumerate(zip(mine, others, strict=False), start=1):
        if number <= COMPARED_STEPS and not abs(b["loss"] / a["loss"] - 1) <= LOSS_TOLERANCE[precision]:
            return f"loss of step {number} is {b['loss']:.5f}, Isthmus has {a['loss']:.5f}"
    return None
