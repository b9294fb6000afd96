"""Experiment trackers: TensorBoard, Weights & Biases, MLflow and Trackio, behind one interface."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from isthmus.config.schema.output import LoggingConfig
from isthmus.errors import DataError, UsageError
from isthmus.extras import check_installed, install_command, optional_package
from isthmus.files.atomic_write import write_atomic
from isthmus.files.input_files import read_json

_IDS = "trackers.json"
"""File in the run folder: the ids of a tracker's run, by the tracker's name. A resumed run continues them."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    folder: Path
    start: int
    """Steps done before; points of later steps, left by an interruption, are replaced where the tracker can do so."""
    project: str
    name: str
    settings: Mapping[str, Any]
    """All settings of the run by dotted name."""

    def known_id(self, tracker: str) -> str | None:
        """The id that an earlier start of this run had."""
        return self._known_ids().get(tracker) if self.start else None

    def keep_id(self, tracker: str, number: str) -> None:
        write_atomic(self.folder / _IDS, json.dumps(self._known_ids() | {tracker: number}) + "\n")

    def _known_ids(self) -> dict[str, str]:
        """Empty if the file is damaged: then the tracker begins another run."""
        with suppress(OSError, DataError):
            known = read_json(self.folder / _IDS)
            if isinstance(known, dict):
                return {name: number for name, number in known.items() if isinstance(number, str)}
        return {}


Answers = Sequence[tuple[str, str]]
"""Prompts and answers."""
_ANSWERS = "eval/answers"


class Tracker(Protocol):
    """Receives the metrics of a run, on one rank."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """``values`` by tag, such as ``train/loss``."""

    def log_answers(self, answers: Answers, step: int) -> None:
        """Under the tag ``eval/answers``."""

    def close(self, *, failed: bool) -> None: ...


class _TensorBoard:
    def __init__(self, run: TrackedRun) -> None:
        with optional_package("logging.to=tensorboard", "tensorboard"):
            from torch.utils.tensorboard.summary import hparams
            from torch.utils.tensorboard.writer import SummaryWriter

        if threading.excepthook is threading.__excepthook__:
            threading.excepthook = _without_tensorboard
        purge_step = run.start + 1 if run.start else None
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge_step)  # type: ignore[no-untyped-call]
        plain = {
            name: value if isinstance(value, bool | int | float) else str(value) for name, value in run.settings.items()
        }
        experiment, session, _ = hparams(plain, {"train/loss": 0.0, "eval/loss": 0.0})  # type: ignore[no-untyped-call]
        for summary in (experiment, session):  # SummaryWriter.add_hparams would write them into another run
            self._writer._get_file_writer().add_summary(summary)  # type: ignore[no-untyped-call]

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    def log_answers(self, answers: Answers, step: int) -> None:
        for number, (prompt, answer) in enumerate(answers, start=1):
            # As code, which Markdown does not change.
            text = "\n".join(f"    {line}" for line in [*prompt.splitlines(), "", *answer.splitlines()])
            self._writer.add_text(f"{_ANSWERS}/{number}", text, step)  # type: ignore[no-untyped-call]

    def close(self, *, failed: bool) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]


def _without_tensorboard(failed: threading.ExceptHookArgs) -> None:
    """The thread that writes the events raises its error a second time in the next call, where it is handled."""
    if type(failed.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(failed)


class _WandB:
    """Entity, host and offline mode are those of W&B's environment variables."""

    def __init__(self, run: TrackedRun) -> None:
        with optional_package("logging.to=wandb", "wandb"):
            from wandb import init  # reads an attribute: megatron.core imports wandb lazily

        self._run: Any = init(
            project=run.project,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.settings),
            id=run.known_id("wandb"),
            resume="allow",
        )
        run.keep_id("wandb", self._run.id)
        # W&B's own step cannot go back, as it does in a run that resumes from an earlier checkpoint.
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def log_answers(self, answers: Answers, step: int) -> None:
        with optional_package("logging.to=wandb", "wandb"):
            from wandb import Table

        table = Table(columns=["prompt", "answer"], data=[list(pair) for pair in answers])
        self._run.log({_ANSWERS: table, "step": step})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _MLflow:
    """The server is that of ``MLFLOW_TRACKING_URI``."""

    _BATCH, _LONGEST = 100, 500
    """Limits of MLflow's servers: parameters in a request, characters of a value."""

    def __init__(self, run: TrackedRun) -> None:
        with optional_package("logging.to=mlflow", "mlflow"):
            from mlflow.entities import Param
            from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient()
        if (known := run.known_id("mlflow")) is not None:
            self._client.update_run(known, status="RUNNING")
            self._id: str = known
            return
        experiment = self._client.get_experiment_by_name(run.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        self._id = self._client.create_run(number, run_name=run.name).info.run_id
        run.keep_id("mlflow", self._id)
        params = [Param(name, str(value)[: self._LONGEST]) for name, value in run.settings.items()]
        for first in range(0, len(params), self._BATCH):
            self._client.log_batch(self._id, params=params[first : first + self._BATCH])

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=step)

    def log_answers(self, answers: Answers, step: int) -> None:
        rows = [{"prompt": prompt, "answer": answer} for prompt, answer in answers]
        self._client.log_text(self._id, json.dumps(rows, ensure_ascii=False, indent=2), f"{_ANSWERS}/step-{step}.json")

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class _Trackio:
    """Local by default; a Space is that of Trackio's environment variables."""

    def __init__(self, run: TrackedRun) -> None:
        with optional_package("logging.to=trackio", "trackio"):
            import trackio

        with redirect_stdout(sys.stderr):  # it prints how to open its dashboard; stdout is for results
            self._run: Any = trackio.init(
                project=run.project,
                name=run.known_id("trackio") or run.name,
                config=dict(run.settings),
                resume="allow",
                embed=False,
            )
        run.keep_id("trackio", self._run.name)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def log_answers(self, answers: Answers, step: int) -> None:
        with optional_package("logging.to=trackio", "trackio"):
            import pandas
            import trackio

        table = trackio.Table(dataframe=pandas.DataFrame(answers, columns=["prompt", "answer"]))
        self._run.log({_ANSWERS: table}, step=step)

    def close(self, *, failed: bool) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()


_KINDS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "mlflow": _MLflow,
    "trackio": _Trackio,
}
"""The class of each name in ``logging.to``, which is also the name of its package."""


def check_trackers(logging: LoggingConfig) -> tuple[str, ...]:
    """Returns a message if TensorBoard, the default, is not installed.

    Raises:
        UsageError: other trackers are not installed.
    """
    others = [name for name in logging.to if name != "tensorboard"]
    check_installed("logging.to", *others, otherwise="omit what is not installed")
    if "tensorboard" not in logging.to or find_spec("tensorboard") is not None:
        return ()
    hint = f"Run {install_command('tensorboard')}, or set logging.to=[]."
    return (f"TensorBoard is not installed: only metrics.jsonl is written. {hint}",)


class Trackers:
    """The trackers of a run. One that fails is left out with a warning and does not end the run."""

    def __init__(self, logging: LoggingConfig, run: TrackedRun, warn: Callable[[str], None]) -> None:
        """Raises UsageError if one cannot start in a new run: nothing is lost yet, and the setting is wrong."""
        self._warn = warn
        self._open: dict[str, Tracker] = {}
        for name in logging.to:
            if find_spec(name) is None:
                continue
            try:
                self._open[name] = _KINDS[name](run)
            except Exception as error:
                if run.start or name == "tensorboard":  # TensorBoard is the default, and needs only the disk
                    self._warn_of(name, error)
                    continue
                self.close(failed=True)
                raise UsageError(f"logging.to: {name} cannot start: {error}. Correct it, or leave it out.") from error

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._use_all(lambda tracker: tracker.log(values, step))

    def log_answers(self, answers: Answers, step: int) -> None:
        self._use_all(lambda tracker: tracker.log_answers(answers, step))

    def close(self, *, failed: bool) -> None:
        self._use_all(lambda tracker: tracker.close(failed=failed))
        self._open.clear()

    def _use_all(self, use: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                use(tracker)
            except Exception as error:
                del self._open[name]
                self._warn_of(name, error)

    def _warn_of(self, name: str, error: Exception) -> None:
        self._warn(f"warning: {name} failed and records nothing from here on ({error}); metrics.jsonl has all rows")
