"""How the ranks differ, every ``logging.ranks_every`` steps: the slowest one, and GPUs that throttle."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median, median_low

import torch

from isthmus.config.schema import LoggingConfig
from isthmus.platforms.gpu_sensors import GpuReading, GpuSensors, Throttle
from isthmus.train.reporter import Reporter
from isthmus.train.watcher import Watcher
from isthmus.train.work_time import WorkTime

_NUMBERS = 5
"""Numbers of a rank in a report: its work time, then the fields of its GpuReading."""
_MEASURED = (2, 3, 4)
"""Steps before a report that are measured; on a GPU, later ones may not be complete."""


@dataclass(kw_only=True, slots=True)
class RankReports(Watcher):
    """The numbers of all ranks are gathered with the sums of a step, without a collective of their own."""

    settings: LoggingConfig
    rank: int
    hosts: Sequence[str]
    """Host names of all ranks."""
    stages: int
    """Pipeline stages, whose work differs: a rank is compared with those of its stage."""
    device: torch.device
    sensors: GpuSensors | None
    reporter: Reporter
    _measured: deque[tuple[int, WorkTime]] = field(default_factory=lambda: deque(maxlen=len(_MEASURED)))
    _last_slowest: int | None = None
    _throttled: set[int] = field(default_factory=set)

    def context(self, step: int) -> AbstractContextManager[None]:
        """Measures the step if a report needs it."""
        interval = self.settings.ranks_every
        if not interval or len(self.hosts) == 1 or all((step + lag) % interval for lag in _MEASURED):
            return nullcontext()
        time = WorkTime(self.device)
        self._measured.append((step, time))
        return time.measured()

    def host_numbers(self, step: int) -> list[float]:
        """Work time of this rank and readings of its GPU, in the places of this rank."""
        interval = self.settings.ranks_every
        if not interval or step % interval or (len(self.hosts) == 1 and self.sensors is None):
            return []
        times = [time.seconds for measured, time in self._measured if measured <= step - _MEASURED[0]]
        gpu = GpuReading(math.nan, math.nan, math.nan, Throttle.NONE) if self.sensors is None else self.sensors.read()
        values = [
            median(times) if times else math.nan,
            gpu.temperature_c,
            gpu.power_w,
            gpu.clock_mhz,
            float(gpu.throttle),
        ]
        numbers = [0.0] * (_NUMBERS * len(self.hosts))
        numbers[_NUMBERS * self.rank : _NUMBERS * (self.rank + 1)] = values
        return numbers

    def metrics(self, step: int, sums: Sequence[float]) -> dict[str, float]:
        """Metrics of the ranks; warns of slow ranks and GPUs that throttle."""
        ranks = [sums[first : first + _NUMBERS] for first in range(0, len(sums), _NUMBERS)]
        if not ranks:
            return {}
        gpus = [GpuReading(heat, power, clock, Throttle(int(throttle))) for _, heat, power, clock, throttle in ranks]
        metrics = self._gpu_metrics(step, gpus)
        work_s = [values[0] for values in ranks]
        return (self._slowest(step, work_s, gpus) if all(map(math.isfinite, work_s)) else {}) | metrics

    def _slowest(self, step: int, work_s: Sequence[float], gpus: Sequence[GpuReading]) -> dict[str, float]:
        ranks = len(work_s)
        peers: dict[int, list[float]] = defaultdict(list)
        stages = self.stages if self.stages < ranks else 1
        for rank, rank_s in enumerate(work_s):
            peers[rank * stages // ranks].append(rank_s)
        usual_s = [median_low(peers[rank * stages // ranks]) for rank in range(ranks)]
        slowest = max(range(ranks), key=lambda rank: work_s[rank] - usual_s[rank])
        seconds, usual = work_s[slowest], usual_s[slowest]
        share = (seconds - usual) / seconds if seconds else 0.0
        if share >= self.settings.straggler_share:
            text = (
                f"warning: rank {slowest} on {self.hosts[slowest]} is slow: its own work takes {seconds:.3g} s of a "
                f"step, that of the median rank {usual:.3g} s, and the other ranks wait for {share:.0%} of it"
                f"{_described(gpus[slowest])}. Check its machine with isthmus doctor."
            )
            details = {
                "rank": slowest,
                "host": self.hosts[slowest],
                "own_s": seconds,
                "median_s": usual,
                "share": share,
            }
            self.reporter.event(step, "slow rank", text, prints=slowest != self._last_slowest, **details)
        self._last_slowest = slowest if share >= self.settings.straggler_share else None
        return {"slowest_rank": slowest, "slowest_rank_s": seconds, "median_rank_s": usual, "straggler_share": share}

    def _gpu_metrics(self, step: int, gpus: Sequence[GpuReading]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, values, choose in (
            ("gpu_temperature_c", [gpu.temperature_c for gpu in gpus], max),
            ("gpu_power_w", [gpu.power_w for gpu in gpus], median),
            ("gpu_clock_mhz", [gpu.clock_mhz for gpu in gpus], min),
        ):
            if known := [value for value in values if math.isfinite(value)]:
                metrics[name] = choose(known)
        if not metrics:
            return {}
        hot = [rank for rank, gpu in enumerate(gpus) if gpu.throttle & (Throttle.HEAT | Throttle.HARDWARE)]
        if hot:
            first = hot[0]
            text = (
                f"warning: {len(hot)} of {len(gpus)} GPUs throttle, first rank {first} on {self.hosts[first]}"
                f"{_described(gpus[first])}. Check the cooling and the power supply of the machine."
            )
            self.reporter.event(step, "throttled GPU", text, prints=not self._throttled.issuperset(hot), ranks=hot)
        self._throttled = set(hot)
        return metrics | {"throttled_gpus": len(hot)}


def _described(gpu: GpuReading) -> str:
    """`` (GPU: 95 C, 1200 MHz, limited by heat)``; empty if nothing is known."""
    known = [
        f"{value:.0f} {unit}" for value, unit in ((gpu.temperature_c, "C"), (gpu.clock_mhz, "MHz")) if value == value
    ]
    names = {Throttle.POWER: "its power limit", Throttle.HEAT: "heat", Throttle.HARDWARE: "a slowdown of the hardware"}
    reasons = [name for reason, name in names.items() if gpu.throttle & reason]
    known += [f"limited by {' and '.join(reasons)}"] if reasons else []
    return f" (GPU: {', '.join(known)})" if known else ""
