"""Reports a run: printed lines, rows of ``metrics.jsonl``, experiment trackers."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from isthmus.config.schema import LoggingConfig
from isthmus.errors import IOFailure, IsthmusError
from isthmus.train.callbacks import Callbacks
from isthmus.train.console import Console
from isthmus.train.metrics import (
    WIDTH,
    StepMetrics,
    megatron_line,
    printed,
    sample_text,
    step_cell,
    step_line,
    tracker_tag,
)
from isthmus.train.row_file import RowFile
from isthmus.train.trackers import TrackedRun, Trackers

EVENTS = "events.jsonl"


class Reporter:
    """Prints (to stderr) and records on the main rank only.

    A closed terminal or a tracker that fails does not end the run. A ``metrics.jsonl`` that cannot be written does so
    at the next checkpoint: a resumed run needs its rows.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: LoggingConfig,
        *,
        is_main: bool,
        callbacks: Sequence[str] = (),
        device: str = "device",
        prints_steps: bool = False,
    ) -> None:
        """Args:
        callbacks: ``module:Class`` of the user's callbacks.
        device: unit of TFLOP/s, "GPU" or "rank".
        prints_steps: print the steps on another rank too.
        """
        self._run_dir, self._samples_path = run_dir, run_dir / "samples.jsonl"
        self._settings = settings
        self._is_main = is_main
        self._device = device
        self._prints_steps = is_main or prints_steps
        self._total_steps = 0
        self._metrics: RowFile | None = None
        self._samples: RowFile | None = None
        self._events: RowFile | None = None
        self._trackers: Trackers | None = None
        self._console = Console(settings.progress)
        self._callbacks = Callbacks(callbacks if is_main else ())
        self._first: tuple[int, float] | None = None
        """The first step of this process and the monotonic time of its end, in seconds."""

    def begin(self, *, total_steps: int, start: int = 0, settings: Mapping[str, Any] | None = None) -> None:
        """Open the files, see :class:`RowFile`; ``settings`` are recorded by trackers."""
        self._total_steps = total_steps
        if not self._is_main:
            return
        path = self._run_dir / "metrics.jsonl"
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            self._metrics, self._samples, self._events = (
                RowFile(file, start=start, warn=self._console.print, every_step=file == path)
                for file in (path, self._samples_path, self._run_dir / EVENTS)
            )
            self._metrics.sync()
        except (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
            raise IOFailure(f"{path} cannot be written: {error.strerror}. Choose another --out.") from error
        self._console.show_progress(total_steps, start)
        name = self._settings.name or self._run_dir.absolute().name
        run = TrackedRun(self._run_dir, start, self._settings.project, name, settings or {})
        self._trackers = Trackers(self._settings, run, self._console.print)
        self._callbacks.call("begin", self._run_dir, settings or {}, step=start, total_steps=total_steps)

    def __enter__(self) -> Reporter:
        if self._is_main:
            self._console.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        self._console.close()
        if self._trackers is not None:
            self._trackers.close(failed=kind is not None)
        files = [file for file in (self._metrics, self._samples, self._events) if file is not None]
        self._trackers = self._metrics = self._samples = self._events = None
        try:
            for file in files:
                with suppress(*([IsthmusError] if kind else [])):  # the run fails for a reason of its own
                    file.close()
        finally:
            self._callbacks.call("end", error)

    def sync(self) -> None:
        """Write all rows to the disk, on the main rank; a checkpoint that is saved now needs them.

        Raises:
            NoSpace, IOFailure: a file cannot be written.
        """
        for file in (self._metrics, self._samples, self._events):
            if file is not None:
                file.sync()

    def saved(self, step: int, checkpoint: Path | str) -> None:
        """``checkpoint`` is a path, or a URL of a store."""
        self.event(step, "checkpoint", f"saved {checkpoint}", path=str(checkpoint))
        self._callbacks.call("save", step, checkpoint)

    def exported(self, step: int, model: Path) -> None:
        self.event(step, "export", f"exported {model}", path=str(model))
        self._callbacks.call("export", step, model)

    def stopped(self, done: int, part: str) -> None:
        """After a stop request; ``part`` of the run was not completed, or is empty."""
        incomplete = f" ({part} was not completed)" if part else ""
        self.event(done, "stop", f"stopped after step {done} as requested{incomplete}", prints=False)

    def event(self, step: int, kind: str, text: str, *, prints: bool = True, **details: Any) -> None:
        """Record in ``events.jsonl`` what happened in or after ``step``, with a ``text`` for people, and print it.

        ``details`` are values of JSON. Before :meth:`begin` it is only printed.
        """
        if prints:
            self.log(text)
        if self._events is not None:
            row = {"step": step, "event": kind, "time_s": round(time.time(), 3), "text": text, **_finite(details)}
            self._events.add([row])
            self._callbacks.call("event", row)

    def log(self, text: str) -> None:
        if self._is_main:
            self._console.print(text)

    def step(self, metrics: StepMetrics) -> None:
        if self._first is None:
            self._first = (metrics.step, time.monotonic())
        is_due = metrics.step % self._settings.every == 0
        if self._is_main:
            is_due = is_due or metrics.step in (self._first[0], self._total_steps)
            row = metrics.flat() | {"time_s": round(time.time(), 3)}
            self._record(row, points=is_due)
            self._callbacks.call("step", row)
        if is_due and self._prints_steps:
            self._console.print(self._line(metrics), of_step=True)
        self._console.advance(metrics, self._total_steps, self._time_left_s(metrics.step))

    def evaluation(
        self,
        step: int,
        loss: float,
        objective: Mapping[str, float] | None = None,
        *,
        part: Literal["valid", "test"] = "valid",
    ) -> None:
        """Record ``valid_loss`` or ``test_loss`` and the metrics of the objective."""
        if not self._is_main:
            return
        objective = objective or {}
        row = {"step": step, **{f"{part}_{name}": value for name, value in {"loss": loss, **objective}.items()}}
        self._record(row)
        self._callbacks.call("evaluation", row)
        if part == "valid":
            self._console.validated(loss)
        name = {"valid": "validation", "test": "test"}[part]
        cells = [step_cell(step, self._total_steps), f"{name} loss {loss:.4f}", *printed(objective).values()]
        self._console.print("  ".join(cells))

    def answers(self, step: int, answers: Sequence[tuple[str, str]]) -> None:
        """Write answers to prompts, (prompt, answer), to ``samples.jsonl`` and the trackers; print the first."""
        self._add_samples(step, [{"prompt": prompt, "answer": answer} for prompt, answer in answers], answers)

    def rollout_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write generated answers with their rewards to ``samples.jsonl`` and the trackers; print the first."""
        self._add_samples(step, _finite(samples), [(sample["prompt"], sample["completion"]) for sample in samples])

    def _add_samples(self, step: int, rows: Sequence[Mapping[str, Any]], answers: Sequence[tuple[str, str]]) -> None:
        if not self._is_main or not answers:
            return
        assert self._samples is not None, "begin() comes first"
        self._samples.add([{"step": step, **row} for row in rows])
        if self._trackers is not None:
            self._trackers.log_answers(answers, step)
        cell = step_cell(step, self._total_steps)
        file = f"  ({self._samples_path.name})"
        text = sample_text(*answers[0], WIDTH - len(cell) - 2 - len(file))
        self._console.print(f"{cell}  {text}{file}")

    def _record(self, row: dict[str, Any], *, points: bool = True) -> None:
        assert self._metrics is not None, "begin() comes first"
        clean = _finite(row)
        self._metrics.add([clean])
        if points and self._trackers is not None:
            values = {tracker_tag(k): v for k, v in clean.items() if k not in ("step", "time_s") and v is not None}
            self._trackers.log(values, row["step"])

    def _line(self, metrics: StepMetrics) -> str:
        if self._settings.style == "megatron":
            return megatron_line(metrics, self._total_steps)
        return step_line(metrics, self._total_steps, left_s=self._time_left_s(metrics.step), device=self._device)

    def _time_left_s(self, step: int) -> float | None:
        # The first step warms up and is not representative.
        if self._first is None or not self._first[0] < step < self._total_steps:
            return None
        first, at_s = self._first
        return (time.monotonic() - at_s) / (step - first) * (self._total_steps - step)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; they become null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
