"""How fast the machine multiplies at this moment: a process beside a contestant, asked before and after each step.

A shared machine's speed changes by a quarter within the hour, so a ceiling of another minute says little of a step. The
process is one of its own, so that what it needs is not counted as the contestant's memory; it sleeps while steps run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from sft.ceiling import DTYPES, drawn, layouts, products, turns_s

RATES = ("torch_mm", "faster")
"""By ``torch.mm``, and by the library that Isthmus takes where that is faster."""


class Beside:
    """The process, and what it said."""

    def __init__(self, spec: dict[str, Any]) -> None:
        """Start it; ``spec`` is that of :mod:`sft.ceiling`."""
        command = [sys.executable, "-m", "sft.beside", json.dumps(spec)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._flops = 0.0
        self._possible = dict.fromkeys(RATES, 0.0)
        self._before = self._ask()

    def _ask(self) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print("now", file=self._process.stdin, flush=True)
        told = self._process.stdout.readline()
        if not told:
            raise RuntimeError("the process that measures the ceiling beside the steps has ended; its error is above")
        rates: dict[str, float] = json.loads(told)
        return rates

    def step_done(self, flops: float, took_s: float) -> None:
        """A step of ``flops`` operations has taken ``took_s``: measure what the machine could have done."""
        after = self._ask()
        self._flops += flops
        for name in RATES:
            self._possible[name] += took_s * (self._before[name] + after[name]) / 2 * 1e9
        self._before = after

    def close(self) -> dict[str, float]:
        """End the process. Returns the operations of all steps over those that the ceilings beside them allowed."""
        self._process.communicate()
        return {f"executed_share_of_{name}_beside": self._flops / possible for name, possible in self._possible.items()}


def measure(spec: dict[str, Any]) -> dict[str, float]:
    """The rate of the fastest shape, in 10^9 operations a second: mean of three repetitions, or of 10 ms."""
    dtype = DTYPES[spec["precision"]]
    rates: dict[str, list[float]] = {name: [] for name in RATES}
    pairs = [(drawn(n, n, dtype), drawn(n, n, dtype)) for n in spec["squares"][:2]]
    for name, tokens, inputs, outputs, _ in products(spec):
        if name != "head":  # no faster than the others, and takes as long as all of them
            pairs += layouts(tokens, inputs, outputs, dtype).values()
    for a, b in pairs:
        flops = 2.0 * a.size(0) * a.size(1) * b.size(1)
        by_torch, by_choice = (flops / statistics.mean(times) / 1e9 for times in turns_s(a, b, 0.01))
        rates["torch_mm"].append(by_torch)
        rates["faster"].append(max(by_torch, by_choice))
    return {name: max(found) for name, found in rates.items()}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    measure(asked)  # libraries are loaded and shapes compiled
    for _ in sys.stdin:
        print(json.dumps(measure(asked)), flush=True)
