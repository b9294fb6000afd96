"""Host time of a call of each compiled region of a dense layer: as Isthmus calls it, by torch.compile, and eagerly.

    python benchmarks/region_calls.py --record

Regions are compiled for this CPU, and their tensors have four tokens, so that a call is nearly the time of the host: on
a GPU it launches kernels instead. The three take turns, and the fastest of many calls counts. See docs/decisions/0089.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from certificate import certificate, publish_result

TOKENS, HIDDEN, GROUPS, QUERIES, CHANNELS = 4, 16, 2, 2, 4
CONTESTANTS = ("isthmus", "torch.compile", "eager")
CALLS = 200
"""Calls of a turn, whose mean counts."""


def regions() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Name -> region, its arguments."""
    import torch

    from isthmus.engine.attention import projected_heads
    from isthmus.engine.layers import activation, norm
    from isthmus.engine.layers.fused_function import fused_regions

    hidden, residual, grad = torch.randn(3, TOKENS, 1, HIDDEN)
    weight, head_weight = torch.nn.Parameter(torch.ones(HIDDEN)), torch.nn.Parameter(torch.ones(CHANNELS))
    scale, buffer, head_buffer = torch.ones(TOKENS, 1, 1), torch.zeros(HIDDEN), torch.zeros(CHANNELS)
    activate, activate_backward = fused_regions(activation.swiglu)
    settings = projected_heads.HeadSettings(GROUPS, (QUERIES * CHANNELS, CHANNELS, CHANNELS), False, 1e-5, False)
    mixed = torch.randn(TOKENS, 1, GROUPS * (QUERIES + 2) * CHANNELS)
    weights = torch.randn(TOKENS, CHANNELS), head_weight, head_weight
    queries, keys = torch.randn(TOKENS, GROUPS, QUERIES, CHANNELS), torch.randn(TOKENS, GROUPS, CHANNELS)
    return {
        "residual sum and norm": (norm._normalized, (hidden, residual, weight, None, 1e-5, False, False)),
        "its backward": (
            norm._norm_backward,
            (grad, grad, hidden, weight, None, scale, 1e-5, False, False, True, buffer, None),
        ),
        "heads": (projected_heads._heads, (mixed, *weights, *settings)),
        "their backward": (
            projected_heads._heads_backward,
            (queries, keys, keys, keys, mixed, *weights, head_buffer, head_buffer, True, *settings),
        ),
        "SwiGLU": (activate, (residual,)),
        "its gradient": (activate_backward, (hidden[..., : HIDDEN // 2].contiguous(), hidden)),
    }


def microseconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def measure(rounds: int) -> dict[str, dict[str, float]]:
    import torch

    from isthmus.engine.compiled import compile_limit, set_compile

    torch.set_num_threads(1)
    set_compile(True, device="cpu")
    results: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        for name, (region, arguments) in regions().items():
            by_dynamo = torch.compile(region.function, fullgraph=True, dynamic=False, **compile_limit())
            contestants = dict(zip(CONTESTANTS, (region, by_dynamo, region.function), strict=True))
            for contestant in contestants.values():
                contestant(*arguments)  # compiles
            times: dict[str, list[float]] = {contestant: [] for contestant in contestants}
            for _ in range(rounds):
                for contestant, function in contestants.items():
                    times[contestant].append(microseconds(lambda: function(*arguments)))  # noqa: B023  (called at once)
            results[name] = {contestant: min(values) for contestant, values in times.items()}
    return results


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=60, help="turns of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    measured = measure(chosen.rounds)
    print(f"{'microseconds of a call':24}  isthmus  torch.compile  eager")
    for name, times in measured.items():
        print(f"{name:24}  {times['isthmus']:7.1f}  {times['torch.compile']:13.1f}  {times['eager']:5.1f}")
    total = {who: sum(times[who] for times in measured.values()) for who in CONTESTANTS}
    ratios = {who: total[who] / total["isthmus"] for who in CONTESTANTS}
    print(", ".join(f"{who} {ratio:.2f}" for who, ratio in ratios.items()), "times the time of isthmus")
    result = {"certificate": certificate(arguments), "microseconds": measured, "ratio to isthmus": ratios}
    publish_result("region-calls", result, record=chosen.record, out=chosen.out)


if __name__ == "__main__":
    main(sys.argv[1:])
