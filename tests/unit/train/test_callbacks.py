"""Callbacks get the events of a run; wrong ones are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.config.schema import LoggingConfig
from isthmus.errors import IsthmusError, MissingInput, UsageError
from isthmus.train.callbacks import Callback, Callbacks
from isthmus.train.reporter import Reporter
from unit.train.test_reporter import metrics

CODE = """
from isthmus import Callback


class Records(Callback):
    events = []

    def begin(self, folder, settings, *, step, total_steps):
        self.events.append(("begin", folder.name, settings["optim.lr"], step, total_steps))

    def step(self, metrics):
        self.events.append(("step", metrics["step"], metrics["loss"]))

    def evaluation(self, metrics):
        self.events.append(("evaluation", metrics["step"], metrics["valid_loss"]))

    def save(self, step, checkpoint):
        self.events.append(("save", step, checkpoint.name))

    def export(self, step, model):
        self.events.append(("export", step, model.name))

    def end(self, error):
        self.events.append(("end", error))


class Fails(Callback):
    def step(self, metrics):
        raise ZeroDivisionError("no tokens")


class NeedsArguments(Callback):
    def __init__(self, url):
        pass


class NoCallback:
    pass
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_callbacks.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reporter(folder: Path, *names: str, is_main: bool = True) -> Reporter:
    return Reporter(folder / "run", LoggingConfig(to=()), is_main=is_main, callbacks=names)


def test_events(folder: Path) -> None:
    with reporter(folder, "own_callbacks:Records") as report:
        report.begin(total_steps=5, start=2, settings={"optim.lr": 0.5})
        report.step(metrics(3, loss=1.5))
        report.evaluation(3, 1.25)
        report.saved(3, Path("iter_0000003"))
        report.exported(3, Path("hf"))
    import own_callbacks  # type: ignore[import-not-found]

    assert own_callbacks.Records.events == [
        ("begin", "run", 0.5, 2, 5), ("step", 3, 1.5), ("evaluation", 3, 1.25), ("save", 3, "iter_0000003"),
        ("export", 3, "hf"), ("end", None),
    ]  # fmt: skip
    own_callbacks.Records.events.clear()
    with reporter(folder, "own_callbacks:Records", is_main=False) as report:
        report.begin(total_steps=1)
    assert not own_callbacks.Records.events
    with pytest.raises(KeyboardInterrupt), reporter(folder, "own_callbacks:Records"):
        raise KeyboardInterrupt
    ((event, error),) = own_callbacks.Records.events
    assert event == "end" and isinstance(error, KeyboardInterrupt)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("own_callbacks", UsageError, r"got 'own_callbacks', expected module:Class"),
        ("no_such_module:Alert", MissingInput, r"No module named 'no_such_module'. Give module:Class"),
        ("own_callbacks:Alert", MissingInput, r"has no attribute 'Alert'"),
        ("own_callbacks:NoCallback", UsageError, r"is not a subclass of isthmus.Callback"),
        ("own_callbacks:NeedsArguments", UsageError, r"NeedsArguments\(\) failed: TypeError"),
    ],
)
def test_wrong_names(name: str, error: type[IsthmusError], message: str) -> None:
    with pytest.raises(error, match=message):
        Callbacks([name])


def test_an_exception_ends_the_run(folder: Path) -> None:
    message = r"own_callbacks:Fails failed in step: ZeroDivisionError: no tokens. Correct it, or leave it out"
    with pytest.raises(UsageError, match=message), reporter(folder, "own_callbacks:Fails") as report:
        report.begin(total_steps=1)
        report.step(metrics(1))
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_events_without_code_do_nothing() -> None:
    callback = Callback()
    callback.begin(Path("run"), {}, step=0, total_steps=1)
    for event in (callback.step, callback.evaluation):
        event({})
    callback.end(None)
