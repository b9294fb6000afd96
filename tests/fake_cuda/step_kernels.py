"""A task that counts the kernels of a step, for ``benchmarks/step_cost.py`` and its test."""

from __future__ import annotations

from typing import Any

from fake_cuda.trace import record
from fake_cuda.world import build


def kernels(model: str, tokens: int, layers: int) -> dict[str, Any]:
    """Of a step with one and of a step with two micro batches: kernels outside of regions, calls of regions, their
    kernels without a compiler, and synchronizations.
    """
    from isthmus.engine import compiled

    calls: list[int] = []
    run = compiled._Region.__call__

    def region(self: Any, *args: Any) -> Any:
        with record() as inside:
            result = run(self, *args)
        calls.append(inside.num_kernels)
        return result

    compiled._Region.__call__ = region  # type: ignore[method-assign]
    described: Any = {"path": model, "config": {"num_hidden_layers": layers}, "init": "random"}
    rank = build("unused", sections={"model": described, "data": {"seq_length": tokens}})
    compiled.set_compile(True)  # as with Triton; regions with fake tensors are not compiled
    found: dict[str, Any] = {}
    for count in (1, 2):
        rank.stepper.train_step([rank.batch(tokens)] * count)  # lazy set-up
        calls.clear()
        with record() as trace:
            rank.stepper.train_step([rank.batch(tokens)] * count)
        found[str(count)] = [trace.num_kernels - sum(calls), len(calls), sum(calls), len(trace.syncs)]
    return found
