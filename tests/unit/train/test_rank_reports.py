from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from isthmus.config.schema import LoggingConfig
from isthmus.platforms.gpu_sensors import GpuReading, Throttle
from isthmus.train.rank_reports import RankReports

COOL = GpuReading(60.0, 400.0, 1900.0, Throttle.POWER)
HOT = GpuReading(95.0, 300.0, 900.0, Throttle.HEAT)


def reports(events: list[Any], ranks: int, *, stages: int = 1, sensors: Any = None, rank: int = 0) -> RankReports:
    def event(step: int, kind: str, text: str, *, prints: bool, **_: Any) -> None:
        events.append((step, kind, prints, text))

    return RankReports(
        settings=LoggingConfig(ranks_every=10, straggler_share=0.2),
        rank=rank,
        hosts=[f"node{number // 2}" for number in range(ranks)],
        stages=stages,
        device=torch.device("cpu"),
        sensors=sensors,
        reporter=SimpleNamespace(event=event),  # type: ignore[arg-type]
    )


def sums(own_s: list[float], readings: list[GpuReading] | None = None) -> list[float]:
    nothing = GpuReading(math.nan, math.nan, math.nan, Throttle.NONE)
    gpus = readings or [nothing] * len(own_s)
    return [
        number
        for seconds, gpu in zip(own_s, gpus, strict=True)
        for number in (seconds, gpu.temperature_c, gpu.power_w, gpu.clock_mhz, float(gpu.throttle))
    ]


def test_the_slowest_rank_is_named_once_while_it_stays_the_slowest() -> None:
    events: list[Any] = []
    item = reports(events, 4)
    result = item.metrics(10, sums([1.0, 1.1, 2.0, 0.9]))
    assert result == {"slowest_rank": 2, "slowest_rank_s": 2.0, "median_rank_s": 1.0, "straggler_share": 0.5}
    item.metrics(20, sums([1.0, 1.1, 2.0, 0.9]))
    item.metrics(30, sums([1.0, 1.1, 1.05, 0.9]))  # below the threshold
    item.metrics(40, sums([1.0, 1.1, 2.0, 0.9]))
    assert [(step, kind, prints) for step, kind, prints, _ in events] == [
        (10, "slow rank", True), (20, "slow rank", False), (40, "slow rank", True),
    ]  # fmt: skip
    assert "rank 2 on node1 is slow" in events[0][3] and "wait for 50% of it. Check" in events[0][3]


def test_a_rank_is_compared_with_those_of_its_pipeline_stage() -> None:
    """The last stage has the loss, which takes time on all of its ranks."""
    events: list[Any] = []
    result = reports(events, 4, stages=2).metrics(10, sums([1.0, 1.3, 3.0, 3.05]))
    assert result["slowest_rank"] == 1 and result["straggler_share"] > 0.2 and len(events) == 1
    assert reports([], 2, stages=2).metrics(10, sums([1.0, 3.0]))["slowest_rank"] == 1


def test_gpus_that_throttle() -> None:
    events: list[Any] = []
    item = reports(events, 2)
    result = item.metrics(10, sums([1.0, 2.0], [COOL, HOT]))
    assert result["gpu_temperature_c"] == 95.0 and result["gpu_clock_mhz"] == 900.0 and result["throttled_gpus"] == 1
    assert result["gpu_power_w"] == 350.0 and result["slowest_rank"] == 1
    item.metrics(20, sums([1.0, 1.0], [COOL, HOT]))
    assert [(kind, prints) for _, kind, prints, _ in events] == [
        ("throttled GPU", True), ("slow rank", True), ("throttled GPU", False),
    ]  # fmt: skip
    assert "first rank 1 on node0 (GPU: 95 C, 900 MHz, limited by heat)" in events[0][3]
    assert "(GPU: 95 C, 900 MHz, limited by heat). Check its machine" in events[1][3]
    assert reports([], 1).metrics(10, sums([math.nan], [COOL]))["throttled_gpus"] == 0, "a power limit is usual"


def test_numbers_of_a_rank_alone() -> None:
    item = reports([], 1, sensors=SimpleNamespace(read=lambda: COOL))
    assert item.host_numbers(9) == [] and item.host_numbers(10)[1:] == [60.0, 400.0, 1900.0, 1.0]
    assert reports([], 1).host_numbers(10) == [] == reports([], 2).host_numbers(9)
    second = reports([], 2, rank=1).host_numbers(10)
    assert second[:5] == [0.0] * 5 and len(second) == 10
    both = [ours + theirs for ours, theirs in zip(reports([], 2).host_numbers(10), second, strict=True)]
    assert reports([], 2).metrics(10, both) == {}, "no step was measured, as after a resume"
