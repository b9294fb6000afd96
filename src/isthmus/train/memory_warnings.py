"""Warns when the memory of a GPU is full."""

from __future__ import annotations

from isthmus.platforms.base import Platform
from isthmus.train.metrics import StepMetrics
from isthmus.train.reporter import Reporter
from isthmus.train.watcher import Watcher


class MemoryWarnings(Watcher):
    """Reports the number of :meth:`isthmus.platforms.base.Platform.memory_retries` at each power of two."""

    def __init__(self, platform: Platform, reporter: Reporter) -> None:
        self._platform, self._reporter = platform, reporter
        self._retries = platform.memory_retries()

    def step_finished(self, metrics: StepMetrics) -> None:
        before, self._retries = self._retries, self._platform.memory_retries()
        if warning := memory_warning(before, self._retries):
            self._reporter.event(metrics.step, "memory full", warning)


def memory_warning(before: int, now: int) -> str | None:
    """A line when the number of retries passes a power of two."""
    if now.bit_length() <= before.bit_length():
        return None
    return (
        f"warning: GPU memory was full {now} times so far. torch then waits for the GPU, returns unused memory and "
        "tries again, which is slow. Lower train.micro_batch_size or data.seq_length, raise parallel.tp, or set "
        "train.recompute=full."
    )
