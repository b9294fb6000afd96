"""Steady-state speed of a training loop: the first steps warm up, then every step is timed and its tokens counted."""

from __future__ import annotations

import time
from typing import Any

from rounds import CpuWatch, peak_rss_gib, rss_gib

from sft.workload import Turn


class Clock:
    """Told of every step's end; says when there is enough."""

    def __init__(self, turn: Turn) -> None:
        """Note the memory held before training, with the libraries and the model in it."""
        self._turn = turn
        self._rss_before_gib = rss_gib()
        self._steps = 0
        self._watch = CpuWatch()
        self._at_s = time.perf_counter()
        self.times_s: list[float] = []
        self.tokens: list[int] = []
        self.losses: list[float] = []

    def step_done(self, num_tokens: int) -> None:
        """A step has ended in which ``num_tokens`` tokens, padding not counted, ran through the model."""
        now_s = time.perf_counter()
        self._steps += 1
        if self._steps > self._turn.warmup_steps:
            self.times_s.append(now_s - self._at_s)
            self.tokens.append(num_tokens)
        elif self._steps == self._turn.warmup_steps:
            self._watch = CpuWatch()
        self._at_s = time.perf_counter()

    def go_on(self) -> None:
        """What happened since the last step's end is not part of the next."""
        self._at_s = time.perf_counter()

    @property
    def enough(self) -> bool:
        """Whether as much has been timed as was asked for."""
        return len(self.times_s) >= self._turn.timed_steps and sum(self.tokens) >= self._turn.timed_tokens

    def result(self) -> dict[str, Any]:
        """The figures of one turn."""
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
