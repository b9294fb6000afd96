"""A task that counts the kernels of a step, for ``benchmarks/step_cost.py`` and its test."""

from __future__ import annotations

from typing import Any

from fake_cuda.trace import record
from fake_cuda.world import build


def kernels(model: str, tokens: int, layers: int) -> dict[str, list[int]]:
    """Number of micro batches (1 and 2) -> kernels outside of compiled regions, regions, synchronizations of a step."""
    described: Any = {"path": model, "config": {"num_hidden_layers": layers}, "init": "random"}
    rank = build("unused", sections={"model": described, "data": {"seq_length": tokens}})
    values: dict[str, list[int]] = {}
    for count in (1, 2):
        rank.stepper.train_step([rank.batch(tokens)] * count)  # lazy set-up
        with record() as trace:
            rank.stepper.train_step([rank.batch(tokens)] * count)
        regions = sum(number for name, number in trace.kernels.items() if name.startswith("region "))
        values[str(count)] = [trace.num_kernels - regions, regions, len(trace.syncs)]
    return values
