"""Measures the steady-state speed of a training loop: times and tokens of all steps after the warm-up."""

from __future__ import annotations

import time
from typing import Any

from rounds import CpuWatch, peak_rss_gib, rss_gib

from sft.workload import Turn


class Clock:
    """Times the steps of a run."""

    def __init__(self, turn: Turn) -> None:
        """Record the memory before training, which includes libraries and the model."""
        self._turn = turn
        self._rss_before_gib = rss_gib()
        self._steps = 0
        self._watch = CpuWatch()
        self._at_s = time.perf_counter()
        self.times_s: list[float] = []
        self.tokens: list[int] = []
        self.losses: list[float] = []

    def step_done(self, num_tokens: int) -> None:
        """End a step with ``num_tokens`` tokens, without padding."""
        now_s = time.perf_counter()
        self._steps += 1
        if self._steps > self._turn.warmup_steps:
            self.times_s.append(now_s - self._at_s)
            self.tokens.append(num_tokens)
        elif self._steps == self._turn.warmup_steps:
            self._watch = CpuWatch()
        self._at_s = time.perf_counter()

    def restart(self) -> None:
        """Exclude the time since the end of the last step from the next one."""
        self._at_s = time.perf_counter()

    @property
    def enough(self) -> bool:
        """Whether enough steps and tokens have been timed."""
        return len(self.times_s) >= self._turn.timed_steps and sum(self.tokens) >= self._turn.timed_tokens

    def result(self) -> dict[str, Any]:
        """The result of the run."""
        speed = sum(self.tokens) / sum(self.times_s)
        cpu, peak_gib = self._watch.shares(), peak_rss_gib()
        others = f"others had {cpu['others_cpu_use']:.0%} of the cores"
        return cpu | {
            "tokens_per_s": speed,
            "step_times_s": self.times_s,
            "step_tokens": self.tokens,
            "first_loss": self.losses[0] if self.losses else None,
            "peak_rss_gib": peak_gib,
            "rss_before_training_gib": self._rss_before_gib,
            "line": f"{speed:8.1f} tokens/s  peak {peak_gib:.2f} GiB  {others}",
        }
