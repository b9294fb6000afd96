"""Experiment trackers receive the metrics of a run, offline, and never end it."""

from __future__ import annotations

import json
import resource
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus import extras
from isthmus.cli.process import ExitStatus, print_error
from isthmus.config.schema.output import LoggingConfig
from isthmus.errors import UsageError
from isthmus.train import trackers
from isthmus.train.reporter import Reporter
from isthmus.train.trackers import TrackedRun, Trackers, check_trackers
from unit.train.test_reporter import metrics

SETTINGS = {"optim.lr": 1e-3, "data.files": ["a.json"], "train.epochs": None}


def run_of(folder: Path, name: str, *, start: int = 0, losses: Mapping[int, float], valid: float | None = None) -> None:
    settings = LoggingConfig.model_validate({"to": name, "project": "trains"})
    with Reporter(folder, settings, is_main=True) as report:
        report.begin(total_steps=3, start=start, settings=SETTINGS)
        for step, loss in losses.items():
            report.step(metrics(step, loss=loss))
        if valid is not None:
            report.evaluation(3, valid)
            report.answers(3, [("2 + 2?", "It is 4."), ("Why?", "<b>")])


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run_of(tmp_path, "tensorboard", losses={1: 2.0, 2: 1.0}, valid=1.5)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    folder = tmp_path / "tensorboard"
    assert len(list(folder.rglob("*"))) == 1  # no second run
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]
    assert [point.value for point in events.Scalars("eval/loss")] == [1.5]
    (event,) = events.Tensors("eval/answers/1/text_summary")
    assert (event.step, event.tensor_proto.string_val[0]) == (3, b"    2 + 2?\n    \n    It is 4.")
    assert {tag.partition("/")[0] for tag in events.Tags()["scalars"]} == {"train", "eval", "perf"}
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    chosen = HParamsPluginData.FromString(content).session_start_info.hparams
    assert chosen["optim.lr"].number_value == 1e-3 and chosen["data.files"].string_value == "['a.json']"


@pytest.mark.processes
def test_mlflow_continues_the_run_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracking = pytest.importorskip("mlflow.tracking", reason="MLflow is not installed (extra: mlflow)")
    folder = tmp_path / "first"
    run_of(folder, "mlflow", losses={1: 2.0, 2: 1.5})
    run_of(folder, "mlflow", start=2, losses={3: 1.0}, valid=0.5)
    client = tracking.MlflowClient()
    (result,) = client.search_runs([client.get_experiment_by_name("trains").experiment_id])
    assert (result.info.run_name, result.info.status) == ("first", "FINISHED")
    assert result.data.params["optim.lr"] == "0.001" and result.data.metrics["eval/loss"] == 0.5
    history = client.get_metric_history(result.info.run_id, "train/loss")
    assert sorted((point.step, point.value) for point in history) == [(1, 2.0), (2, 1.5), (3, 1.0)]
    (answers,) = (tmp_path / "mlruns").rglob("eval/answers/step-3.json")
    assert json.loads(answers.read_text())[0] == {"prompt": "2 + 2?", "answer": "It is 4."}


@pytest.mark.thorough
@pytest.mark.processes
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="Weights & Biases is not installed (extra: wandb)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_of(tmp_path / "first", "wandb", losses={1: 2.0, 2: 1.5}, valid=0.5)
    (records,) = (tmp_path / "first" / "wandb").glob("offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60.0
    while b"trains" not in (stored := records.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.1)  # another process of W&B writes it
    (table,) = (tmp_path / "first" / "wandb").rglob("*.table.json")
    assert json.loads(table.read_text())["data"] == [["2 + 2?", "It is 4."], ["Why?", "<b>"]]
    for text in (b"train/loss", b"eval/loss", b"optim.lr", b"trains"):
        assert text in stored
    number = json.loads((tmp_path / "first" / "trackers.json").read_text())["wandb"]
    assert number in records.name
    run_of(tmp_path / "first", "wandb", start=2, losses={3: 1.0})
    folders = (tmp_path / "first" / "wandb").glob("offline-run-*")
    assert {path.name.rpartition("-")[2] for path in folders} == {number}


def test_trackio_continues_the_run_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="Trackio is not installed (extra: trackio)")
    from trackio.sqlite_storage import SQLiteStorage

    run_of(tmp_path / "first", "trackio", losses={1: 2.0, 2: 1.5})
    run_of(tmp_path / "first", "trackio", start=2, losses={3: 1.0}, valid=0.5)
    rows = SQLiteStorage.get_logs("trains", "first")
    assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == [(1, 2.0), (2, 1.5), (3, 1.0)]
    assert not capsys.readouterr().out


class Failing:
    """Fails at its second point."""

    def __init__(self, _run: TrackedRun) -> None:
        self.points: list[int] = []

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.points.append(step)
        if len(self.points) == 2:
            raise ConnectionError("the server is gone")

    def close(self, *, failed: bool) -> None:
        raise ConnectionError("the server is still gone")


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[TrackedRun], Any]], None]:
    def use(kind: Callable[[TrackedRun], Any]) -> None:
        monkeypatch.setattr(trackers, "_KINDS", {"wandb": kind})
        for module in (trackers, extras):
            monkeypatch.setattr(module, "find_spec", lambda name: name if name == "wandb" else None)

    return use


def test_a_tracker_that_fails_does_not_end_the_run(
    tmp_path: Path, kinds: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    kinds(Failing)
    run_of(tmp_path, "wandb", losses={1: 2.0, 2: 1.5, 3: 1.0})
    assert capsys.readouterr().err.count("wandb failed and records nothing from here on (the server is gone)") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_tracker_that_cannot_start_is_an_error(tmp_path: Path, kinds: Callable[..., None]) -> None:
    def no_login(_run: TrackedRun) -> Any:
        raise RuntimeError("no API key")

    kinds(no_login)
    run = TrackedRun(tmp_path, 0, "trains", "first", {})
    with pytest.raises(UsageError, match=r"wandb cannot start: no API key\. Correct it, or leave it out"):
        Trackers(LoggingConfig(to=("wandb",)), run, print)
    warnings: list[str] = []
    Trackers(LoggingConfig(to=("wandb",)), replace(run, start=3), warnings.append).log({"train/loss": 1.0}, 4)
    assert warnings == [
        "warning: wandb failed and records nothing from here on (no API key); metrics.jsonl has all rows"
    ]


@pytest.mark.processes
def test_password_of_the_server_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow.tracking", reason="MLflow is not installed (extra: mlflow)")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:pass-word@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UsageError, match=r"mlflow cannot start: .*pass-word") as caught:
        run_of(tmp_path, "mlflow", losses={})
    assert "Traceback" not in capsys.readouterr().err
    print_error(ExitStatus(2, str(caught.value), "".join(traceback.format_exception(caught.value))), debug=True)
    run_of(tmp_path, "mlflow", start=1, losses={})
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "warning: mlflow failed" in shown
    assert "http://***@127.0.0.1:9" in shown and "pass-word" not in shown


def test_broken_tensorboard_does_not_end_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder cannot be created; the file cannot be written any more, which its own thread finds."""
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # not that of pytest
    (tmp_path / "tensorboard").touch()
    run_of(tmp_path, "tensorboard", losses={1: 2.0})
    assert capsys.readouterr().err.count("warning: tensorboard failed and records nothing") == 1
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Reporter(tmp_path / "b", LoggingConfig(), is_main=True) as report:
        report.begin(total_steps=400)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
            for step in range(1, 41):
                report.step(metrics(step))
            for _ in range(100):
                report._trackers.log_answers([("a", "b" * 1000)], 40)  # type: ignore[union-attr]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    err = capsys.readouterr().err
    assert err.count("warning: tensorboard failed and records nothing") == 1 and "Traceback" not in err
    assert len((tmp_path / "b" / "metrics.jsonl").read_text().splitlines()) == 40


def test_absent_packages(kinds: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    kinds(Failing)
    assert check_trackers(LoggingConfig(to=("wandb",))) == ()
    expected = (
        r"logging.to needs mlflow and trackio \(not installed\). Run pip install 'isthmus\[mlflow,trackio\]', or omit"
    )
    with pytest.raises(UsageError, match=expected):
        check_trackers(LoggingConfig(to=("wandb", "mlflow", "trackio")))
    (message,) = check_trackers(LoggingConfig())
    assert "only metrics.jsonl is written. Run pip install 'isthmus[tensorboard]'" in message
    Trackers(LoggingConfig(), SimpleNamespace(), print).log({"train/loss": 1.0}, 1)  # type: ignore[arg-type]
