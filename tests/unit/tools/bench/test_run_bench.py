"""Measured figures, failing cells, and what a second call measures again."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from isthmus.cli.options import configs_and_overrides
from isthmus.config.schema import RunConfig
from isthmus.errors import CheckFailed, DataError, OutputExists, UsageError
from isthmus.tools.bench import bench_table, cell_run, run_bench
from isthmus.tools.bench.bench_checks import git_commit
from isthmus.tools.bench.bench_grid import BenchCell, make_cells
from isthmus.tools.bench.run_bench import Bench, best_rows
from isthmus.tools.bench.step_clock import STEPS_FILE, StepClock

MODEL = ["model.path=some/model"]


def test_figures_are_medians_of_the_time_between_steps() -> None:
    ends = [10.0, 15.0, 16.0, 17.0, 18.5, 19.5]  # the first two steps warm up
    rows = [
        {"end_s": end, "step_time_s": 0.8, "tokens_per_s": 1000.0, "tflops_per_device": 2.0, "mfu": None}
        for end in ends
    ]
    result = cell_run.step_figures(rows, warmup=2, nproc=4)
    assert result["step_times_s"] == [1.0, 1.0, 1.5, 1.0] and result["step_time_s"] == 1.0
    assert result["tokens_per_s"] == 800.0 and result["tokens_per_s_per_device"] == 200.0  # 800 tokens in a step of 1 s
    assert result["tflops_per_device"] == 1.6 and result["mfu"] is None
    assert result["mean_step_time_s"] == 1.125 and result["step_time_spread"] == 0.375


def test_steps_without_an_update_are_no_measurement() -> None:
    rows = [{"end_s": float(step), "step_time_s": 1.0, "tokens_per_s": 1.0, "skipped": step // 3} for step in range(5)]
    with pytest.raises(CheckFailed, match=r"1 measured steps overflowed .* Raise --warmup"):
        cell_run.step_figures(rows, warmup=2, nproc=1)


def test_clock_records_complete_runs_only(tmp_path: Path) -> None:
    for error in (ValueError(), None):
        clock = StepClock()
        clock.begin(tmp_path, {}, step=0, total_steps=2)
        clock.step({"step": 1})
        clock.step({"step": 2})
        clock.end(error)
        assert (tmp_path / STEPS_FILE).exists() == (error is None)
    first, second = json.loads((tmp_path / STEPS_FILE).read_text())
    assert first["step"] == 1 and first["end_s"] <= second["end_s"]


def fake_run(arguments: Sequence[str]) -> int:
    """A command that behaves as the seed of the config says."""
    config = RunConfig.model_validate(json.loads(os.environ["BENCH_TEST_CONFIG"]))
    assert arguments[0] == "pretrain" and arguments[2:] == ["--nproc", "1", "--json"]
    if config.train.seed == 1:
        os.write(2, b"step 1\nisthmus: out of memory. Lower\n  train.micro_batch_size.\n")
        return 70
    if config.train.seed == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.train.seed == 3:
        time.sleep(60)
    Path(config.out).mkdir(parents=True)
    row = {"step_time_s": 1.0, "tokens_per_s": 100.0, "tflops_per_device": 1.0, "mfu": 0.5}
    steps = [{**row, "end_s": float(step)} for step in range(config.train.steps or 0)]
    (Path(config.out) / STEPS_FILE).write_text(json.dumps(steps))
    os.write(1, b'{"memory_gib": 2.5}')  # pytest has replaced sys.stdout
    return 0


@pytest.mark.processes
@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (0, None),
        (1, r"^out of memory\. Lower train\.micro_batch_size\.$"),
        (2, r"^the run was ended by signal 9\. The system may have run out of memory\. Its last output: nothing$"),
        (3, r"^not finished after 0\.5 s, with 0 steps done\. Raise --timeout$"),
    ],
)
def test_a_run_has_figures_or_the_reason(
    seed: int, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"recipe": "pretrain", "out": str(tmp_path / "cells/x"), "model": {"path": "some/model"}}
    values |= {"data": {"mock": True}, "train": {"steps": 4, "seed": seed}}
    monkeypatch.setenv("BENCH_TEST_CONFIG", json.dumps(values))

    def run() -> dict[str, Any]:
        config = RunConfig.model_validate(values)
        return cell_run.run_cell(
            config, nproc=1, warmup=1, timeout_s=0.5 if seed == 3 else 60.0, command=fake_run, watch=lambda steps: None
        )

    if message is None:
        assert run() | {"step_times_s": []} == {
            "tokens_per_s": 100.0, "tokens_per_s_per_device": 100.0, "tflops_per_device": 1.0, "mfu": 0.5,
            "step_time_s": 1.0, "step_time_spread": 0.0, "mean_step_time_s": 1.0, "step_times_s": [], "memory_gib": 2.5,
        }  # fmt: skip
        return
    with pytest.raises(CheckFailed, match=message):
        run()


Runner = Callable[..., tuple[dict[str, Any], list[str], list[str]]]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """Runs a grid with fake runs and checks; returns the result, the log, and the cells that were measured."""
    measured: list[str] = []
    environment = {"torch": "2.9"}

    def check_cells(runs: Sequence[tuple[RunConfig, int]]) -> Iterator[tuple[dict[str, str], str | None]]:
        for config, _ in runs:
            yield environment, "the seed is odd." if config.train.seed % 2 else None

    def run_cell(config: RunConfig, **_: Any) -> dict[str, Any]:
        measured.append(f"{config.train.seed}")
        if config.train.seed == 4:
            raise CheckFailed("out of memory. Lower it.")
        if config.train.seed == 6:
            raise KeyboardInterrupt
        figures = {"tokens_per_s": 10.0 * config.train.seed, "tokens_per_s_per_device": 5.0, "tflops_per_device": 1.0}
        times = {"step_time_s": 1.0, "step_time_spread": 0.01, "mean_step_time_s": 1.0, "step_times_s": [1.0]}
        return figures | times | {"mfu": None, "memory_gib": 1.0}

    monkeypatch.setattr(run_bench, "check_cells", check_cells)
    monkeypatch.setattr(run_bench, "run_cell", run_cell)

    def run(*words: str, retry: bool = False, torch: str = "2.9") -> tuple[dict[str, Any], list[str], list[str]]:
        environment["torch"] = torch
        measured.clear()
        lines: list[str] = []
        results = Bench(
            out=tmp_path / "out", recipe="pretrain", model=None, warmup=1, steps=2, timeout_s=9.0, retry=retry,
            command=fake_run, log=lines.append, watch=lambda cell, steps: None,
        ).run(make_cells([], [*words, *MODEL], [1], configs_and_overrides), "isthmus bench")  # fmt: skip
        return results, lines, list(measured)

    yield run


def test_failing_cells_do_not_end_the_grid(bench: Runner, tmp_path: Path) -> None:
    result, lines, measured = bench("train.seed=-1,1,2,4,8")
    rows = result["cells"]
    assert [row["status"] for row in rows] == ["refused", "refused", "ok", "out of memory", "ok"]
    assert "greater than or equal to 0" in rows[0]["reason"] and rows[1]["reason"] == "the seed is odd."
    assert measured == ["2", "4", "8"]  # the others are refused before any is measured
    assert [line[:30] for line in lines[:2]] == ["--nproc 1 train.seed=-1: refus", "--nproc 1 train.seed=1: refuse"]
    assert [row["settings"][0] for row in best_rows(rows)] == ["train.seed=8"]
    written = json.loads((tmp_path / "out/bench.json").read_text())
    assert len(written["cells"]) == 5 and written["certificate"]["environment"] == {"torch": "2.9"}
    console = Console(width=160, markup=False)
    with console.capture() as captured:
        console.print(bench_table.bench_table(rows))
    table = captured.get()
    assert "the seed is odd." in table and "80" in table and "train.seed" in table


def test_a_second_call_measures_what_is_new_or_changed(bench: Runner) -> None:
    bench("train.seed=2,4")
    result, lines, measured = bench("train.seed=2,4,8")
    assert measured == ["8"] and lines[0].endswith("step 1 s (recorded)")
    assert [row["status"] for row in result["cells"]] == ["ok", "out of memory", "ok"]
    assert bench("train.seed=2,4", retry=True)[2] == ["4"]
    _, lines, measured = bench("train.seed=2,4", torch="2.10")
    assert measured == ["2", "4"]
    assert lines[0].startswith("measured again, since its environment has changed (torch 2.9 -> 2.10): --nproc 1")
    assert bench("train.seed=2", torch="2.10")[2] == []


def test_recorded_cells_have_the_columns_of_the_new_grid(bench: Runner) -> None:
    bench("train.seed=2")
    result, _, measured = bench("train.seed=2,8")
    assert measured == ["8"] and [row["varied"] for row in result["cells"]] == [("train.seed=2",), ("train.seed=8",)]
    assert len(bench_table.bench_table(result["cells"]).columns) == 8


def test_interrupted_grid_continues(bench: Runner) -> None:
    with pytest.raises(KeyboardInterrupt):
        bench("train.seed=2,6,8")
    assert bench("train.seed=2,8")[2] == ["8"]


def test_a_grid_without_a_valid_config_is_an_error(bench: Runner, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"train\.seeds"):
        bench("train.seeds=1,2")
    assert not (tmp_path / "out").exists()


def test_other_folders_are_not_used(bench: Runner, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/file").touch()
    with pytest.raises(OutputExists, match="Choose another folder with --out"):
        bench("train.seed=2")
    (tmp_path / "out/bench.json").write_text("{}")
    with pytest.raises(DataError, match="is damaged"):
        bench("train.seed=2")


def test_a_chart_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'isthmus\[png\]'"):
        bench_table.import_pyplot()


@pytest.mark.processes  # matplotlib runs fc-list if it has no list of fonts yet
def test_chart_has_a_bar_per_cell(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'isthmus[png]'")
    cell = BenchCell("c.yaml", None, ("a=1",), ("a=1",), 1).as_dict()
    rows = [cell | {"status": "ok", "tokens_per_s_per_device": 5.0}, cell | {"status": "timeout", "reason": "slow"}]
    bench_table.write_chart(rows, tmp_path / "x.png", "a device")
    assert (tmp_path / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.processes
def test_commit_of_a_checkout(repository: Path, tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None
    commit = git_commit(repository) if (repository / ".git").exists() else "0" * 40
    assert commit is not None and len(commit.removesuffix("-dirty")) == 40
