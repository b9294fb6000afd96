"""Measures the matmul speed of the machine before and after each step of a contestant, in a separate process.

The speed of a shared machine changes by a quarter within an hour, so a ceiling must be measured close to a step. The
separate process keeps its memory out of the contestant's; it sleeps while steps run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from sft.ceiling import DTYPES, layouts, linear_layers, random_matrix, turns_s

RATES = ("torch_mm", "faster")
"""With ``torch.mm``, and with the library that Isthmus uses if that is faster."""


class CeilingProcess:
    """The measuring process and the sums of its results."""

    def __init__(self, spec: dict[str, Any]) -> None:
        """Start it; ``spec`` is that of :mod:`sft.ceiling`."""
        command = [sys.executable, "-m", "sft.ceiling_process", json.dumps(spec)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._flops = 0.0
        self._possible = dict.fromkeys(RATES, 0.0)
        self._before = self._ask()

    def _ask(self) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print("now", file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that measures the ceiling has ended; its error is above")
        rates: dict[str, float] = json.loads(line)
        return rates

    def step_done(self, flops: float, took_s: float) -> None:
        """Add a step of ``flops`` operations that took ``took_s``, and the operations possible in that time."""
        after = self._ask()
        self._flops += flops
        for name in RATES:
            self._possible[name] += took_s * (self._before[name] + after[name]) / 2 * 1e9
        self._before = after

    def close(self) -> dict[str, float]:
        """End the process; returns the operations of all steps divided by those possible."""
        self._process.communicate()
        return {f"executed_share_of_{name}_beside": self._flops / possible for name, possible in self._possible.items()}


def measure(spec: dict[str, Any]) -> dict[str, float]:
    """The rate of the fastest shape, in 10^9 operations a second: mean of three repetitions, or of 10 ms."""
    dtype = DTYPES[spec["precision"]]
    rates: dict[str, list[float]] = {name: [] for name in RATES}
    pairs = [(random_matrix(n, n, dtype), random_matrix(n, n, dtype)) for n in spec["squares"][:2]]
    for name, tokens, inputs, outputs, _ in linear_layers(spec):
        if name != "head":  # not faster than the others, and takes as long as all of them together
            pairs += layouts(tokens, inputs, outputs, dtype).values()
    for a, b in pairs:
        flops = 2.0 * a.size(0) * a.size(1) * b.size(1)
        by_torch, by_choice = (flops / statistics.mean(times) / 1e9 for times in turns_s(a, b, 0.01))
        rates["torch_mm"].append(by_torch)
        rates["faster"].append(max(by_torch, by_choice))
    return {name: max(result) for name, result in rates.items()}


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    measure(spec)  # warm-up
    for _ in sys.stdin:
        print(json.dumps(measure(spec)), flush=True)
