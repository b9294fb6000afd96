"""Reports a run: printed lines, rows of ``metrics.jsonl``, experiment trackers."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from isthmus.atomic_write import write_atomic
from isthmus.config.schema import LoggingConfig
from isthmus.errors import IOFailure
from isthmus.train.callbacks import Callbacks
from isthmus.train.metrics import (
    WIDTH,
    StepMetrics,
    megatron_line,
    printed,
    shortened,
    step_cell,
    step_line,
    tracker_tag,
)
from isthmus.train.trackers import TrackedRun, Trackers

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


_CLOSED = (OSError, ValueError)
"""Errors of a closed terminal or pipe; they do not end a run."""


class Console:
    """Lines on stderr: above a progress bar on a terminal, plain elsewhere."""

    def __init__(self) -> None:
        self._bar: tuple[Progress, TaskID] | None = None

    def show_progress(self, total_steps: int, done: int = 0) -> None:
        """Show a progress bar if stderr is a terminal."""
        if not sys.stderr.isatty():
            return
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=RichConsole(stderr=True, highlight=False),
            transient=True,
        )
        self._bar = (progress, progress.add_task("training", total=total_steps, completed=done))
        progress.start()

    def print(self, text: str) -> None:
        with suppress(*_CLOSED):
            if self._bar is None:
                print(text, file=sys.stderr, flush=True)
            else:
                self._bar[0].console.print(text, markup=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        if self._bar is not None:
            progress, task = self._bar
            progress.update(task, completed=step)

    def close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(*_CLOSED):
                bar[0].stop()


class Reporter:
    """Prints (to stderr) and records on the main rank only.

    A closed terminal does not end the run; a ``metrics.jsonl`` that cannot be written does.
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
        self._run_dir = run_dir
        self._settings = settings
        self._is_main = is_main
        self._device = device
        self._prints_steps = is_main or prints_steps
        self._total_steps = 0
        self._file: IO[str] | None = None
        self._trackers: Trackers | None = None
        self._console = Console()
        self._callbacks = Callbacks(callbacks if is_main else ())
        self._first: tuple[int, float] | None = None
        """The first step of this process and the monotonic time of its end, in seconds."""

    def begin(self, *, total_steps: int, start: int = 0, settings: Mapping[str, Any] | None = None) -> None:
        """Open the files; rows of steps after ``start`` (left by an interruption) are removed.

        ``settings`` are recorded by trackers.
        """
        self._total_steps = total_steps
        if not self._is_main:
            return
        path = self._run_dir / "metrics.jsonl"
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            for file in (path, self._run_dir / "samples.jsonl"):
                cut_after(file, start)
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
            raise IOFailure(f"{path} cannot be written: {error.strerror}. Choose another --out.") from error
        self._console.show_progress(total_steps, start)
        name = self._settings.name or self._run_dir.absolute().name
        run = TrackedRun(self._run_dir, start, self._settings.project, name, settings or {})
        self._trackers = Trackers(self._settings, run, self._console.print)
        self._callbacks.call("begin", self._run_dir, settings or {}, step=start, total_steps=total_steps)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        self._console.close()
        if self._trackers is not None:
            self._trackers.close(failed=kind is not None)
        if self._file is not None:
            self._file.close()
        self._trackers = self._file = None
        self._callbacks.call("end", error)

    def saved(self, step: int, checkpoint: Path) -> None:
        self.log(f"saved {checkpoint}")
        self._callbacks.call("save", step, checkpoint)

    def exported(self, step: int, model: Path) -> None:
        self.log(f"exported {model}")
        self._callbacks.call("export", step, model)

    def log(self, text: str) -> None:
        if self._is_main:
            self._console.print(text)

    def step(self, metrics: StepMetrics) -> None:
        if self._first is None:
            self._first = (metrics.step, time.monotonic())
        is_due = metrics.step % self._settings.every == 0
        if self._is_main:
            is_due = is_due or metrics.step in (self._first[0], self._total_steps)
            row = metrics.flat()
            self._record(row, points=is_due)
            self._callbacks.call("step", row)
        if is_due and self._prints_steps:
            self._console.print(self._line(metrics))
        self._console.advance(metrics.step)

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
        name = {"valid": "validation", "test": "test"}[part]
        cells = [step_cell(step, self._total_steps), f"{name} loss {loss:.4f}", *printed(objective).values()]
        self._console.print("  ".join(cells))

    def answers(self, step: int, answers: Sequence[tuple[str, str]]) -> None:
        """Write answers to prompts, (prompt, answer), to ``samples.jsonl`` and the trackers; print the first."""
        if not self._is_main or not answers:
            return
        path = self._run_dir / "samples.jsonl"
        rows = [{"step": step, "prompt": prompt, "answer": answer} for prompt, answer in answers]
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if self._trackers is not None:
            self._trackers.log_answers(answers, step)
        text = " ".join(f"{answers[0][0]} -> {answers[0][1]}".split())
        self._console.print(f"{step_cell(step, self._total_steps)}  {shortened(text, WIDTH - 20)}  ({path})")

    def _record(self, row: dict[str, Any], *, points: bool = True) -> None:
        assert self._file is not None, "begin() comes first"
        # JSON has no NaN.
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps(clean) + "\n")
        if points and self._trackers is not None:
            values = {tracker_tag(k): v for k, v in clean.items() if k != "step" and v is not None}
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


def first_valid_loss(path: Path) -> float | None:
    """The first validation loss in a ``metrics.jsonl``: before the first step, also if the run was resumed."""
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):  # another row, or one that is being written
            return float(json.loads(line)["valid_loss"])
    return None


def cut_after(path: Path, step: int) -> None:
    """Remove the rows of later steps, and an incomplete last row, from a file of rows; step 0 empties it."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines() if step else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        # The resumed run evaluates the state after ``step`` again.
        last = step - 1 if isinstance(row, dict) and row.keys() & {"valid_loss", "test_loss", "answer"} else step
        if isinstance(row, dict) and row.get("step", step + 1) <= last:
            kept.append(line)
    write_atomic(path, b"".join(line + b"\n" for line in kept))
