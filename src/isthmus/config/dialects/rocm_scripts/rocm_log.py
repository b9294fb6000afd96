"""The summary at the end of the logs of ROCm's training scripts, computed from the iteration lines."""

from __future__ import annotations

import re
from statistics import fmean

_FIGURES = {
    "throughput per GPU": r"throughput per GPU \(TFLOP/s/GPU\): ([0-9.]+)",
    "elapsed time per iteration": r"elapsed time per iteration \(ms\): ([0-9.]+)",
    "mem usages": r"mem usages: ([0-9.]+)",
}


def summary(log: str, *, tokens_per_step: int, ranks: int, skip: int = 2, with_throughput: bool = True) -> list[str]:
    """One line per mean over the iterations, without the first ``skip`` and the last; over all if the run is too short.

    ROCm's validation suite and dashboards read these lines. ``tokens_per_step`` counts all ranks, ``ranks`` all nodes.
    """
    iterations = [line for line in log.splitlines() if re.search(r"\biteration +\d+/ *\d+ \|", line)]
    counted = iterations[skip:-1] or iterations
    means: dict[str, float] = {}
    for name, pattern in _FIGURES.items():
        values = [float(found.group(1)) for line in counted if (found := re.search(pattern, line))]
        if values:
            means[name] = fmean(values)
    if "elapsed time per iteration" not in means:
        return []
    elapsed_ms = means["elapsed time per iteration"]
    lines = [f"means over {len(counted)} of {len(iterations)} iterations:"]
    if with_throughput and "throughput per GPU" in means:
        lines.append(f"throughput per GPU: {means['throughput per GPU']}")
    lines += [
        f"elapsed time per iteration: {elapsed_ms}",
        f"tokens/GPU/s: {tokens_per_step * 1000 / (elapsed_ms * ranks):.6f}",
    ]
    if "mem usages" in means:
        lines.append(f"mem usages: {means['mem usages']}")
    return lines
