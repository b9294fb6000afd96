from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isthmus.config.schema import LoggingConfig
from isthmus.errors import IOFailure
from isthmus.train.console import Console
from isthmus.train.metrics import WIDTH, StepMetrics, duration, megatron_line, sample_text, step_line, tracker_tag
from isthmus.train.reporter import Reporter
from isthmus.train.row_file import first_valid_loss, rows_until


def metrics(step: int, **more: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": step, "loss": 2.5, "lr": 1e-5, "grad_norm": 0.75, "tokens_per_s": 1234.5, "tflops_per_device": 0.123,
        "mfu": 0.4, "memory_gib": 1.5, "num_tokens": 100, "loss_tokens": 60, "step_time_s": 0.5,
        "consumed_sequences": 16 * step,
    }  # fmt: skip
    return StepMetrics(**values | more)


def reporter(folder: Path, *, is_main: bool = True, tensorboard: bool = False, interval: int = 1) -> Reporter:
    return Reporter(folder, LoggingConfig(to=("tensorboard",) if tensorboard else (), every=interval), is_main=is_main)


def rows(folder: Path) -> list[dict[str, Any]]:
    results = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "checksum"} for row in results]


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
    expected = "loss lr grad_norm tokens_per_s tflops_per_device mfu memory_gib num_tokens loss_tokens step_time_s"
    assert set(expected.split()) <= set(written[1])
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert not out and lines[0] == "platform cpu" and "validation loss 4.2500" in lines[1]
    for part in ("step 1/3", "loss  2.5000", "lr 1.00e-05", "norm  0.750", "1,234 tok/s", "MFU 40.0%"):
        assert part in lines[2]


@pytest.mark.parametrize("total", [10, 99_999, 999_999])
@pytest.mark.parametrize(
    "more",
    [
        {"mfu": None},
        {},
        {"mfu": None, "tflops_per_device": 1234.5},
        {"loss_scale": 4096.0, "skipped": 12},
        {"objective": {"rewards/margins": -0.125, "rewards/accuracies": 0.5}},
    ],
)
def test_step_lines_are_aligned_and_fit(total: int, more: dict[str, Any]) -> None:
    small = {"loss": 0.0123, "lr": 0.0, "grad_norm": 0.001, "tokens_per_s": 53.2, "memory_gib": 0.35}
    large = {"loss": 12.5, "lr": 4e-3, "grad_norm": 12.345, "tokens_per_s": 251_234.0, "memory_gib": 141.25}
    lines = [
        step_line(metrics(step, **values | more), total, left_s=left_s, device="GPU")
        for step, values, left_s in ((1, small, None), (2, small, 8.0), (total // 2, large, 36_000.0))
    ]
    assert max(map(len, lines)) <= WIDTH
    for unit in ("loss", "lr", "norm", "tok/s", "TFLOP/s", "MFU", "GiB", "left"):
        results = {line.index(unit) + len(unit) for line in lines if unit in line}
        assert len(results) <= 1, lines  # the same column in every line
    assert all("norm" in line for line in lines)


def test_all_updates_on_a_rollout_print_its_metrics() -> None:
    """Only the row of the first update has them."""
    short, long = ({"reward": 0.5, "answer_tokens": tokens} for tokens in (9.5, 12_345.0))
    updates = [
        metrics(1, objective=short | {"kl": 0.1}, rollout=short),
        metrics(2, objective={"kl": 0.2}, rollout=short),
        metrics(3, objective=long | {"kl": 0.1}, rollout=long),
    ]
    lines = [step_line(update, 9, left_s=None) for update in updates]
    assert all("reward  0.500  length " in line for line in lines)
    assert len({line.index("norm") for line in lines}) == 1, lines
    assert [sorted(update.flat().keys() & {"reward", "rollout", "kl"}) for update in updates[:2]] == [
        ["kl", "reward"],
        ["kl"],
    ]
    names = [[part.partition(":")[0] for part in megatron_line(update, 9).split(" | ")[1:]] for update in updates]
    assert [sorted(row) for row in names] == [sorted(names[0])] * 3


def test_a_line_keeps_what_matters_most() -> None:
    def cells(**more: Any) -> str:
        return step_line(metrics(1, **more), 99_999, left_s=36_000.0, device="GPU")

    assert "MFU" in cells() and "left" not in cells() and "GiB" not in cells()
    assert "0.1 TFLOP/s" in cells(mfu=None) and "TFLOP/s" not in step_line(metrics(1, mfu=None), 9, left_s=None)
    short = step_line(metrics(1, mfu=None), 99, left_s=36_000.0)
    assert short.endswith("10:00:00 left") and "lr" in short and "tok/s" in short
    pairs = step_line(metrics(1, objective={"rewards/margins": 0.5, "rewards/accuracies": 1.0}), 999, left_s=None)
    assert "margin  0.500  acc 1.000" in pairs and "tok/s" in pairs


def test_a_long_prompt_leaves_room_for_the_answer() -> None:
    assert sample_text("2 +\n2?", "It is 4.", 50) == "2 + 2? -> It is 4."
    assert sample_text("a" * 90, "It is 4.", 50) == f"{'a' * 35}... -> It is 4."
    text = sample_text("a" * 90, "b" * 90, 50)
    assert len(text) == 50 and text == f"{'a' * 13}... -> {'b' * 27}..."
    assert sample_text("2 + 2?", "b" * 90, 50).startswith("2 + 2? -> bbb")


def test_tags_of_tensorboard_have_three_groups() -> None:
    expected = {
        "loss": "train/loss", "grad_norm": "train/grad_norm", "moe_aux_loss": "train/moe_aux_loss",
        "rewards/margins": "train/rewards/margins", "valid_loss": "eval/loss", "test_loss": "eval/test_loss",
        "valid_rewards/margins": "eval/rewards/margins", "tokens_per_s": "perf/tokens_per_s", "mfu": "perf/mfu",
        "memory_gib": "perf/memory_gib", "step_time_s": "perf/step_time_s",
    }  # fmt: skip
    assert {key: tracker_tag(key) for key in expected} == expected


def test_first_validation_loss(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert first_valid_loss(path) is None
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "valid_loss": 1.5}\n{"step": 4, "valid_loss": 1.0}\n{"st')
    assert first_valid_loss(path) == 1.5


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reporter(tmp_path / "run", is_main=False, tensorboard=True) as report:
        report.begin(total_steps=3)
        report.log("x")
        report.step(metrics(1))
        report.evaluation(1, 2.0)
    assert capsys.readouterr() == ("", "") and not (tmp_path / "run").exists()


def test_every_limits_lines_but_not_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reporter(tmp_path, interval=4) as report:
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
    remaining = ['{"step": 1}', '{"step": 1, "valid_loss": 1.0}', '{"step": 2}', '{"step": 2, "valid_loss": 1.5}']
    path.write_text("\n".join([*remaining, '{"step": "2"}', '{"step": 3}', '{"step": 4, "lo']))
    with reporter(tmp_path) as report:
        report.begin(total_steps=9, start=2)
        report.evaluation(2, 1.5)  # has its row
        report.evaluation(2, 2.5, part="test")
        report.evaluation(2, 2.5, part="test")
        report.step(metrics(3))
    assert rows(tmp_path)[:-1] == [json.loads(row) for row in [*remaining, '{"step": 2, "test_loss": 2.5}']]
    assert rows(tmp_path)[-1]["step"] == 3
    with reporter(tmp_path) as report:
        report.begin(total_steps=9)
    assert path.read_text() == ""
    assert [item.name for item in tmp_path.iterdir()] == ["metrics.jsonl"]


def written(folder: Path) -> Path:
    with reporter(folder) as report:
        report.begin(total_steps=9)
        report.evaluation(0, 4.25)
        for step in (1, 2):
            report.step(metrics(step))
    return folder / "metrics.jsonl"


def test_any_flipped_bit_of_a_row_is_found(tmp_path: Path) -> None:
    path = written(tmp_path)
    full, intact = path.read_bytes(), list(rows_until(path, 2))
    assert len(intact) == 3 and all("checksum" not in row for row in intact)
    for at in range(0, 8 * full.index(b"\n"), 5):
        damaged = bytearray(full)
        damaged[at // 8] ^= 1 << at % 8
        path.write_bytes(damaged)
        results = list(rows_until(path, 2))
        values = [{key: value for key, value in row.items() if type(value) is not str} for row in results]
        assert values in (intact[1:], intact), at  # the latter if the name of the checksum was hit
        assert first_valid_loss(path) in (None, 4.25), at


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw.replace(b"4.25", b"4.75"), "has damaged rows (line 1)"),
        (lambda raw: raw.replace(b'"step": 2', b'"step": 1'), "has damaged rows (line 3)"),
        (lambda raw: raw[:-20], "has no row of step 2, from which this run resumes"),
        (lambda raw: b"", "has no row of step 2, from which this run resumes"),
    ],
)
def test_a_resumed_run_reports_damaged_and_missing_rows(
    damage: Callable[[bytes], bytes], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    for warned in (True, False):  # the damaged rows are removed; a missing one is reported again
        with reporter(tmp_path) as report:
            report.begin(total_steps=9, start=2)
        assert (f"warning: {path} {message}" in capsys.readouterr().err) == (warned or "damaged" not in message)


def test_rows_wait_for_room_on_the_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """RLIMIT_FSIZE is the disk: it is full in the middle of a row."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with reporter(tmp_path) as report:
            report.begin(total_steps=5)
            report.step(metrics(1))
            resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 9, before[1]))
            report.step(metrics(2))
            report.evaluation(2, 1.5)
            assert [row["step"] for row in rows(tmp_path)] == [1]
            with pytest.raises(IOFailure, match=re.escape("metrics.jsonl")):
                report.sync()
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            report.step(metrics(3))
            assert [row["step"] for row in rows(tmp_path)] == [1, 2, 2, 3]
            resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size, before[1]))
            report.step(metrics(4))
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 2, 3, 4]
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 1 and "metrics.jsonl cannot be written" in warnings[0]


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


def test_progress_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    console = Console()
    console.show_progress(10, done=3)
    console.print("step 4/10  loss [1.5]")
    console.advance(metrics(4), 10, 12.0)
    console.close()
    assert "step 4/10  loss [1.5]" in capsys.readouterr().err


def test_events_are_rows_that_a_resumed_run_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reporter(tmp_path) as report:
        report.begin(total_steps=9)
        report.saved(2, tmp_path / "iter_2")
        report.event(
            3,
            "skipped step",
            "a gradient overflowed",
            prints=False,
            loss_scale=float("inf"),
            samples=[{"loss": float("nan")}],
        )
    assert "saved" in capsys.readouterr().err
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(row["step"], row["event"]) for row in events] == [(2, "checkpoint"), (3, "skipped step")]
    assert events[0]["path"] == str(tmp_path / "iter_2") and events[1]["loss_scale"] is None
    assert events[1]["samples"] == [{"loss": None}]
    assert "overflowed" not in capsys.readouterr().err
    with reporter(tmp_path, is_main=False) as other:
        other.begin(total_steps=9)
        other.event(3, "resume", "on another rank")
    with reporter(tmp_path) as report:
        report.begin(total_steps=9, start=2)
        report.event(2, "resume", "resumed")
    assert [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()] == [
        "checkpoint", "resume",
    ]  # fmt: skip


def test_duration() -> None:
    assert [duration(s) for s in (0.4, 59.6, 3600, 36000 + 61)] == ["0:00", "1:00", "1:00:00", "10:01:01"]
