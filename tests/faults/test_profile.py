"""The profile of a real run: what its files hold, that the table is true, and what becomes of one that is cut short."""

from __future__ import annotations

import gzip
import json
import re
import signal
import time
from pathlib import Path

import pytest

from faults.command import Ended, rows
from faults.fork_server import ForkServer, Started
from faults.hosts import world

LAYERS, MICRO_BATCHES = 2, 4


def started(isthmus: ForkServer, words: list[str], size: int) -> Started:
    return isthmus.start_ranks([[(words, one) for one in (world(size) if size > 1 else [{}])]])


def ended(isthmus: ForkServer, words: list[str], size: int = 1) -> list[Ended]:
    done = started(isthmus, words, size).ended()
    assert [one.returncode for one in done] == [0] * size, done
    return done


def table(out: Path, rank: int = 0) -> dict[str, tuple[float, float]]:
    """Milliseconds and calls a step by row."""
    text = (out / "profile" / f"rank{rank}.md").read_text()
    found = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| [\d.]+% \| ([\d.]*) ?\|", text, re.MULTILINE)
    return {what: (float(ms), float(calls or 0)) for what, ms, calls in found}


def trace(out: Path, rank: int = 0) -> set[str]:
    """Names of what a trace holds."""
    with gzip.open(out / "profile" / f"rank{rank}.json.gz") as file:
        return {event.get("name") for event in json.load(file)["traceEvents"]}


@pytest.mark.parametrize("size", [1, 2])
def test_table_adds_up_and_names_the_largest(isthmus: ForkServer, small: list[str], tmp_path: Path, size: int) -> None:
    done = ended(isthmus, [*small, f"parallel.tp={size}", "train.profile=2-3"], size)
    out = tmp_path / "out"
    assert {path.name for path in (out / "profile").iterdir()} == {
        f"rank{rank}.{end}" for rank in range(size) for end in ("md", "json.gz")
    }
    for rank in range(size):
        assert {"step 2", "step 3", "optimizer", "data", "aten::addmm_"} <= trace(out, rank)
        costs = table(out, rank)
        total_ms, _ = costs.pop("total")
        measured_ms = 1e3 * sum(row["step_time_s"] for row in rows(out) if row["step"] in (2, 3) and "loss" in row) / 2
        assert sum(ms for ms, _ in costs.values()) == pytest.approx(total_ms, rel=0.01)
        assert total_ms == pytest.approx(measured_ms, rel=0.25)
        # Four weights a layer, and of each the output and both gradients; with tp=2 qkv and fc2 have one shape.
        ours = re.compile("matmuls of .*(attention|feed)")
        products = {what: calls for what, (_, calls) in costs.items() if ours.match(what)}
        assert sum(products.values()) == 4 * 3 * LAYERS * MICRO_BATCHES
        assert size == 2 or products["matmuls of the feed-forward block"] == 2 * 3 * LAYERS * MICRO_BATCHES
        assert costs["attention"][1] == 2 * LAYERS * MICRO_BATCHES and costs["optimizer"][1] == 1
        assert size == 1 or costs["communication between ranks"][1] > 10 * LAYERS
        largest = sorted(costs, key=lambda what: -costs[what][0])[:3]
        head = (out / "profile" / f"rank{rank}.md").read_text().partition("| what")[0]
        assert re.search(r" \d+%, ".join(map(re.escape, largest)) + r" \d+% of the step", head)
        if rank == 0:
            (line,) = [line for line in done[0].stderr.splitlines() if line.startswith("profile of steps 2-3")]
            assert all(what in line for what in largest)


def test_profile_cut_short_by_a_signal_is_written_and_the_rest_comes_later(
    isthmus: ForkServer, small: list[str], tmp_path: Path
) -> None:
    out, words = tmp_path / "out", [*small, "train.steps=2000", "train.profile=3-1999"]
    ranks = started(isthmus, words, 1)
    while not (out / "metrics.jsonl").exists() or all(row.get("step", 0) < 5 for row in rows(out)):
        time.sleep(0.02)
    ranks.send(0, signal.SIGINT)
    (one,) = ranks.ended()
    assert one.returncode == 75, one
    last = max(row["step"] for row in rows(out))
    assert f"profile of steps 3-{last}" in one.stderr and f"step {last}" in trace(out)
    assert f"step {last + 1}" not in trace(out)

    (again,) = ended(isthmus, [*small, f"train.steps={last + 2}", f"train.profile=3-{last + 1}"])
    assert f"profile of step {last + 1}: " in again.stderr and trace(out).isdisjoint({"step 3", f"step {last + 2}"})
    (over,) = ended(isthmus, [*small, f"train.steps={last + 3}", "train.profile=1-2"])
    assert "train.profile=1-2: these steps are done already" in over.stderr


def test_steps_that_the_run_does_not_have(isthmus: ForkServer, small: list[str], tmp_path: Path) -> None:
    (one,) = started(isthmus, [*small, "train.steps=4", "train.profile=3-5"], 1).ended()
    assert "train.profile" in one.error(2) and "from 1 to 4" in one.error(2)
    by_epochs = [word for word in small if not word.startswith("train.steps")]
    (one,) = started(isthmus, [*by_epochs, "train.epochs=0.25", "train.profile=3-500"], 1).ended()
    assert "goes beyond the" in one.error(2) and not (tmp_path / "out").exists()
