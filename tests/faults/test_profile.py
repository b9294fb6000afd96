"""The profile of a real run: its files, its table, and a profile that a signal ends early."""

from __future__ import annotations

import gzip
import json
import re
import signal
import time
from pathlib import Path

import pytest

from faults.command import CompletedCommand, rows
from faults.fork_server import ForkServer, RunningRanks
from faults.hosts import rank_variables

LAYERS, MICRO_BATCHES = 2, 4


def start(isthmus: ForkServer, args: list[str], size: int) -> RunningRanks:
    return isthmus.start_ranks([[(args, item) for item in (rank_variables(size) if size > 1 else [{}])]])


def run(isthmus: ForkServer, args: list[str], size: int = 1) -> list[CompletedCommand]:
    done = start(isthmus, args, size).wait()
    assert [item.returncode for item in done] == [0] * size, done
    return done


def table(out: Path, rank: int = 0) -> dict[str, tuple[float, float]]:
    """Milliseconds and calls per step of each row."""
    text = (out / "profile" / f"rank{rank}.md").read_text()
    results = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| [\d.]+% \| ([\d.]*) ?\|", text, re.MULTILINE)
    return {name: (float(ms), float(calls or 0)) for name, ms, calls in results}


def trace(out: Path, rank: int = 0) -> set[str]:
    """Event names in a trace."""
    with gzip.open(out / "profile" / f"rank{rank}.json.gz") as file:
        return {event.get("name") for event in json.load(file)["traceEvents"]}


@pytest.mark.thorough_cases("2")
@pytest.mark.parametrize("size", [1, 2])
def test_table_sums_to_step_time_and_lists_largest_rows(
    isthmus: ForkServer, sft_args: list[str], tmp_path: Path, size: int
) -> None:
    done = run(isthmus, [*sft_args, f"parallel.tp={size}", "train.profile=2-3"], size)
    out = tmp_path / "out"
    assert {path.name for path in (out / "profile").iterdir()} == {
        f"rank{rank}.{end}" for rank in range(size) for end in ("md", "json.gz")
    }
    for rank in range(size):
        assert {"step 2", "step 3", "optimizer", "data", "aten::addmm_"} <= trace(out, rank)
        profile = table(out, rank)
        total_ms, _ = profile.pop("total")
        measured_ms = 1e3 * sum(row["step_time_s"] for row in rows(out) if row["step"] in (2, 3) and "loss" in row) / 2
        assert sum(ms for ms, _ in profile.values()) == pytest.approx(total_ms, rel=0.01)
        assert total_ms == pytest.approx(measured_ms, rel=0.25)
        # Four weights per layer with forward and both gradients each. With tp=2, qkv and fc2 have the same shape.
        matmul_rows = re.compile("matmuls of .*(attention|feed)")
        matmuls = {name: calls for name, (_, calls) in profile.items() if matmul_rows.match(name)}
        assert sum(matmuls.values()) == 4 * 3 * LAYERS * MICRO_BATCHES
        assert size == 2 or matmuls["matmuls of the feed-forward block"] == 2 * 3 * LAYERS * MICRO_BATCHES
        assert profile["attention"][1] == 2 * LAYERS * MICRO_BATCHES and profile["optimizer"][1] == 1
        assert size == 1 or profile["communication between ranks"][1] > 10 * LAYERS
        largest = sorted(profile, key=lambda name: -profile[name][0])[:3]
        head = (out / "profile" / f"rank{rank}.md").read_text().partition("| what")[0]
        assert re.search(r" \d+%, ".join(map(re.escape, largest)) + r" \d+% of the step", head)
        if rank == 0:
            (line,) = [line for line in done[0].stderr.splitlines() if line.startswith("profile of steps 2-3")]
            assert all(name in line for name in largest)


@pytest.mark.thorough
def test_interrupted_profile_is_written_and_continued_on_resume(
    isthmus: ForkServer, sft_args: list[str], tmp_path: Path
) -> None:
    out, args = tmp_path / "out", [*sft_args, "train.steps=2000", "train.profile=3-1999"]
    ranks = start(isthmus, args, 1)
    while not (out / "metrics.jsonl").exists() or all(row.get("step", 0) < 5 for row in rows(out)):
        time.sleep(0.02)
    ranks.send(0, signal.SIGINT)
    (command,) = ranks.wait()
    assert command.returncode == 75, command
    last = max(row["step"] for row in rows(out))
    assert f"profile of steps 3-{last}" in command.stderr and f"step {last}" in trace(out)
    assert f"step {last + 1}" not in trace(out)

    (again,) = run(isthmus, [*sft_args, f"train.steps={last + 2}", f"train.profile=3-{last + 1}"])
    assert f"profile of step {last + 1}: " in again.stderr and trace(out).isdisjoint({"step 3", f"step {last + 2}"})
    (over,) = run(isthmus, [*sft_args, f"train.steps={last + 3}", "train.profile=1-2"])
    assert "train.profile=1-2: these steps are done already" in over.stderr


def test_profile_of_steps_beyond_the_run_is_refused(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    (command,) = start(isthmus, [*sft_args, "train.steps=4", "train.profile=3-5"], 1).wait()
    assert "train.profile" in command.error(2) and "from 1 to 4" in command.error(2)
    by_epochs = [arg for arg in sft_args if not arg.startswith("train.steps")]
    (command,) = start(isthmus, [*by_epochs, "train.epochs=0.25", "train.profile=3-500"], 1).wait()
    assert "goes beyond the" in command.error(2) and not (tmp_path / "out").exists()
