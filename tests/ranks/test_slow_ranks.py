"""The slowest rank is named in every kind of layout, though all ranks wait for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.config.schema import LoggingConfig
from ranks.rank_pool import RankPool

TASK = "ranks.watch_tasks.train_with_reports"


@pytest.fixture(scope="module")
def run(models: dict[str, Path], samples: Path) -> dict[str, Any]:
    return {"model": models["qwen3-tied"], "samples": samples, "global_batch_size": 8, "interval": 6}


@pytest.mark.thorough_cases("cp2", "fsdp2", "pp2", "tp2-sp")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="dp2"),
        pytest.param({"tp": 2, "sp": True}, id="tp2-sp"),
        pytest.param({"pp": 2}, id="pp2"),
        pytest.param({"cp": 2}, id="cp2"),
        pytest.param({"fsdp": True}, id="fsdp2"),
    ],
)
def test_a_slow_rank_is_named(layout: dict[str, Any], two_ranks: RankPool, run: dict[str, Any]) -> None:
    slow = two_ranks.run(TASK, **run, **layout, slow_rank=1)
    *before, report = slow["reports"]
    assert not any(before)
    assert report["slowest_rank"] == 1 and report["straggler_share"] > LoggingConfig().straggler_share
    assert report["slowest_rank_s"] > 4 * 0.1 and report["median_rank_s"] < report["slowest_rank_s"]
    (event,) = slow["events"]
    assert event["event"] == "slow rank" and event["prints"] and event["host"] == "node1"
    assert "rank 1 on node1 is slow" in event["text"]


@pytest.mark.thorough
def test_measured_steps_are_bitwise_the_same(two_ranks: RankPool, run: dict[str, Any]) -> None:
    case = {name: value for name, value in run.items() if name != "interval"} | {"tp": 2, "slow_rank": None}
    often, never = (two_ranks.run(TASK, **case, interval=interval) for interval in (1, 0))
    assert often["digest"] == never["digest"]
    assert [bool(report) for report in often["reports"]] == [False, False, True, True, True, True]
    assert not any(never["reports"])
