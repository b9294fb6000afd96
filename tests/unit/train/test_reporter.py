from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from isthmus.config.schema import LoggingConfig
from isthmus.errors import IOFailure
from isthmus.train.metrics import StepMetrics, duration
from isthmus.train.reporter import Console, Reporter, cut_after


def metrics(step: int, **more: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": step, "loss": 2.5, "lr": 1e-5, "grad_norm": 0.75, "tokens_per_s": 1234.5, "tflops_per_device": 0.123,
        "mfu": 0.4, "memory_gib": 1.5, "num_tokens": 100, "loss_tokens": 60, "step_time_s": 0.5,
        "consumed_sequences": 16 * step,
    }  # fmt: skip
    return StepMetrics(**values | more)


def reporter(folder: Path, *, is_main: bool = True, tensorboard: bool = False, every: int = 1) -> Reporter:
    return Reporter(folder, LoggingConfig(tensorboard=tensorboard, every=every), is_main=is_main)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_moe_metrics_only_for_moe_models(tmp_path: Path) -> None:
    with reporter(tmp_path) as report:
        report.begin(total_steps=2)
        report.step(metrics(1))
        report.step(metrics(2, moe={"load_max_over_mean": 1.5, "aux_loss": 1.1}))
    dense, sparse = rows(tmp_path)
    assert not [name for name in dense if name.startswith("moe")]
    assert {name: sparse[name] for name in sparse if name.startswith("moe")} == {
        "moe_load_max_over_mean": 1.5,
        "moe_aux_loss": 1.1,
    }


def test_skipped_step_has_its_loss_scale_and_no_norm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reporter(tmp_path / "run") as report:
        report.begin(total_steps=2)
        report.step(metrics(1, grad_norm=float("inf"), loss_scale=4096.0, skipped=1))
        report.step(metrics(2, loss_scale=2048.0, skipped=1))
    first, second = rows(tmp_path / "run")
    assert (first["grad_norm"], first["loss_scale"], first["skipped"]) == (None, 4096.0, 1)
    assert (second["loss_scale"], second["skipped"]) == (2048.0, 1)
    assert "loss scale 4096 (1 skipped)" in capsys.readouterr().err.splitlines()[0]


def test_row_and_line_of_each_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reporter(tmp_path / "run") as report:
        report.log("platform cpu")
        report.begin(total_steps=3)
        report.evaluation(0, 4.25)
        for step in (1, 2, 3):
            report.step(metrics(step))
    written = rows(tmp_path / "run")
    assert written[0] == {"step": 0, "valid_loss": 4.25}
    assert [row["step"] for row in written] == [0, 1, 2, 3]
    wanted = "loss lr grad_norm tokens_per_s tflops_per_device mfu memory_gib num_tokens learned_tokens step_time_s"
    assert set(wanted.split()) <= set(written[1])
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert not out and lines[0] == "platform cpu" and "validation loss 4.2500" in lines[1]
    for part in (
        "step 1/3",
        "loss 2.5000",
        "lr 1.00e-05",
        "grad norm 0.750",
        "1,234 tokens/s",
        "MFU 40.0%",
        "1.50 GiB",
    ):
        assert part in lines[2]
    assert "0.123 TFLOP/s/device (causal)" in lines[2]
    assert "left" not in lines[2] and lines[3].endswith("left") and "left" not in lines[4]


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reporter(tmp_path / "run", is_main=False, tensorboard=True) as report:
        report.begin(total_steps=3)
        report.log("x")
        report.step(metrics(1))
        report.evaluation(1, 2.0)
    assert capsys.readouterr() == ("", "") and not (tmp_path / "run").exists()


def test_every_limits_lines_but_not_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reporter(tmp_path, every=4) as report:
        report.begin(total_steps=10)
        for step in range(1, 11):
            report.step(metrics(step, mfu=None, tflops_per_device=None))
    shown = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["1/10", "4/10", "8/10", "10/10"] and len(rows(tmp_path)) == 10


def test_non_finite_values_are_null(tmp_path: Path) -> None:
    with reporter(tmp_path) as report:
        report.begin(total_steps=1)
        report.step(metrics(1, loss=float("nan"), grad_norm=float("inf")))
    (row,) = rows(tmp_path)
    assert row["loss"] is None and row["grad_norm"] is None and row["lr"] == 1e-5


def test_resuming_removes_later_and_incomplete_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    validation = [f'{{"step": {step}, "valid_loss": 1.0}}' for step in (1, 2)]  # the second is measured again
    validation[1] += '\n{"step": 2, "test_loss": 1.0}'
    path.write_text(
        "\n".join(['{"step": 1}', validation[0], '{"step": 2}', validation[1], '{"step": 3}', '{"step": 4, "lo'])
    )
    with reporter(tmp_path) as report:
        report.begin(total_steps=9, start=2)
        report.step(metrics(3))
    assert [(row["step"], "valid_loss" in row) for row in rows(tmp_path)] == [
        (1, False),
        (1, True),
        (2, False),
        (3, False),
    ]
    cut_after(path, 0)
    assert path.read_text() == ""
    assert [item.name for item in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(IOFailure, match="--out"), reporter(tmp_path / "run") as report:
        report.begin(total_steps=1)


def test_closed_terminal_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

        def isatty(self) -> bool:
            return False

    monkeypatch.setattr(sys, "stderr", Gone())
    with reporter(tmp_path) as report:
        report.begin(total_steps=1)
        report.step(metrics(1))
    assert len(rows(tmp_path)) == 1


def test_tensorboard_points(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with reporter(tmp_path, tensorboard=True) as report:
        report.begin(total_steps=2)
        report.step(metrics(1, loss=2.0))
        report.step(metrics(2, loss=1.0))
        report.evaluation(2, 1.5)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("loss")] == [(1, 2.0), (2, 1.0)]
    assert [point.value for point in events.Scalars("valid_loss")] == [1.5]


def test_missing_tensorboard_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if "tensorboard" in name:
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with reporter(tmp_path, tensorboard=True) as report:
        report.begin(total_steps=2)
        report.step(metrics(1))
        report.step(metrics(2))
    assert capsys.readouterr().err.count("isthmus[tensorboard]") == 1


def test_progress_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    console = Console()
    console.show_progress(10, done=3)
    console.print("step 4/10  loss [1.5]")
    console.advance(4)
    console.close()
    assert "step 4/10  loss [1.5]" in capsys.readouterr().err


def test_duration() -> None:
    assert [duration(s) for s in (0.4, 59.6, 3600, 36000 + 61)] == ["0:00", "1:00", "1:00:00", "10:01:01"]
