"""Start, saves and failures of a long run: the laws that they follow, and published figures."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from isthmus.platforms.parts import part_named
from isthmus.tools.planner.cost.cluster import Cluster
from isthmus.tools.planner.cost.long_run import LongRun, goodput, long_run

LLAMA_405B = Cluster(part_named("H100"), nodes=2048)


def run(cluster: Cluster = LLAMA_405B, **changed: Any) -> LongRun:
    settings = {"step_s": 7.6, "weight_bytes": 0.8e12, "weight_copies": 128, "state_bytes": 5.7e12} | changed
    return long_run(cluster, **settings)


def test_goodput_is_that_of_a_simulated_run() -> None:
    """Failures are drawn at random for 20,000 intervals; the mean agrees with Daly's formula within 2%."""
    draw = random.Random(0)
    interval, pause, restart, mean = 600.0, 30.0, 300.0, 3000.0
    elapsed, saved = 0.0, 0
    failure = draw.expovariate(1 / mean)
    while saved < 20_000:
        if failure >= interval + pause:
            elapsed, failure, saved = elapsed + interval + pause, failure - interval - pause, saved + 1
            continue
        elapsed += failure
        failure = draw.expovariate(1 / mean)
        while failure < restart:  # a restart may fail too
            elapsed += failure
            failure = draw.expovariate(1 / mean)
        elapsed, failure = elapsed + restart, failure - restart
    assert saved * interval / elapsed == pytest.approx(goodput(interval, pause, restart, mean), rel=0.02)


def test_llama_3_405b_fails_every_three_hours_and_trains_for_more_than_90_percent_of_the_time() -> None:
    """ "The Llama 3 Herd of Models" (2024), section 3.3."""
    result = run()
    assert result.failure_s == pytest.approx(54 * 86_400 / 419, rel=0.01)
    assert 0.9 < result.files.goodput < result.memory.goodput < 1


@pytest.mark.parametrize(
    "better",
    [{"failure_s": 86_400.0}, {"storage_gb_s": 20_000.0}, {"weight_copies": 1}],
    ids=lambda case: next(iter(case)),
)
def test_rarer_failures_and_less_to_read_raise_goodput(better: dict[str, Any]) -> None:
    assert run(**better).files.goodput > run().files.goodput


def test_copies_in_memory_help_most_where_storage_is_slow() -> None:
    fast, slow = run(), run(storage_gb_s=20.0)
    gain = [result.memory.goodput - result.files.goodput for result in (fast, slow)]
    assert gain[1] > 5 * gain[0] > 0
    assert slow.memory.restart["copies"] == fast.memory.restart["copies"]


def test_the_interval_is_near_that_of_young_and_no_shorter_than_a_save() -> None:
    result = run(step_s=0.5, state_bytes=5.7e14, storage_gb_s=1e9)
    young = math.sqrt(2 * result.files.pause_s * result.failure_s)
    assert result.files.steps * 0.5 == pytest.approx(young, rel=0.1)
    slow = run(step_s=0.5, storage_gb_s=10.0)
    assert slow.files.steps * 0.5 >= slow.write_s


def test_more_failures_than_a_run_survives_have_no_goodput() -> None:
    assert run(failure_s=0.1).files.goodput == 0


def test_the_start_grows_with_the_ranks_but_for_reading_and_the_first_step() -> None:
    small, large = run(replace(LLAMA_405B, nodes=128)).start, run().start
    assert [large[part] / small[part] for part in ("rendezvous", "communicators")] == [16, 16]
    assert (large["processes"], large["first step"]) == (small["processes"], small["first step"])
