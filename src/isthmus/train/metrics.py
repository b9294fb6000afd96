"""What a run tells: a line a step for the user, an object a step in ``metrics.jsonl``."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from isthmus.atomic_write import write_atomic
from isthmus.errors import IOFailure
from isthmus.train.console import Console, Plain, open_console
from isthmus.train.loggers import Logger, open_loggers
from isthmus.train.megatron_log import megatron_line

_OF_SOME_RUNS = ("loss_scale", "skipped", "memory_used")
_SHOWN = {"rewards/margins": "margin", "rewards/accuracies": "accuracy"}
"""Figures that a line on the screen has too, and their names there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """The numbers of one optimizer step, over all ranks."""

    step: int
    """1 is the first step."""
    loss: float
    """Mean over the learned tokens of the global batch, or over its pairs."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What else there is to tell of it: ``mtp_loss``, the same of layers that predict ahead, or rewards of answers."""
    lr: float
    grad_norm: float
    tokens_per_s: float
    """Of the whole run, padding left out."""
    tflops_per_device: float | None = None
    """Model operations, attention counted causal; None where they are not known."""
    mfu: float | None = None
    """Share of the device's peak, 0..1; None where the peak is not known."""
    memory_gib: float
    """Peak of this rank so far."""
    memory_used: float | None = None
    """Share of the device's memory (on a CPU: of the machine's) that is taken now, by whomever, 0..1."""
    num_tokens: int
    learned_tokens: int
    padding: float = 0.0
    """Share of the lines that is padding, 0..1."""
    step_time_s: float
    consumed_sequences: int
    """Since the start of the run."""
    global_batch_size: int = 0
    """Sequences of the step."""
    loss_scale: float | None = None
    """What the loss was multiplied by; None in all precisions but fp16."""
    skipped: int | None = None
    """Steps so far whose fp16 gradient overflowed: nothing was updated, and the loss scale was halved."""
    moe: Mapping[str, float] = field(default_factory=dict)
    """Of a model with experts: ``load_max_over_mean``, and the losses of its routers that are in use."""

    def flat(self) -> dict[str, Any]:
        """All by name, what concerns experts as ``moe_load_max_over_mean``; without what this run has none of."""
        row = asdict(self)
        del row["global_batch_size"]
        row = {name: value for name, value in row.items() if value is not None or name not in _OF_SOME_RUNS}
        row = {"step": row.pop("step"), "loss": row.pop("loss"), **row.pop("figures"), **row}
        return row | {f"moe_{name}": value for name, value in row.pop("moe").items()}


class Reporter:
    """Prints and records on the main rank; does nothing on the others.

    Lines for the user go to stderr, so that stdout is left to the result. A terminal that goes away does not end
    the run; a ``metrics.jsonl`` that cannot be written does.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        is_main: bool,
        tensorboard: bool,
        every: int,
        device: str = "device",
        style: Literal["isthmus", "megatron"] = "isthmus",
        echoes: bool = False,
    ) -> None:
        """Set up; nothing is written before :meth:`begin`.

        Args:
            run_dir: run folder.
            is_main: whether this rank is the one that speaks.
            tensorboard: also write TensorBoard events.
            every: steps between lines on the screen and TensorBoard points; metrics.jsonl gets every step.
            device: what the TFLOP/s are counted for, in the line's words ("GPU", "rank").
            style: the words of a step's line.
            echoes: print the lines of steps here too, though this is not the main rank.
        """
        self._run_dir = run_dir
        self._is_main = is_main
        self._tensorboard = tensorboard
        self._every = max(1, every)
        self._device = device
        self._style = style
        self._echoes = echoes and not is_main
        self._total_steps = 0
        self._file: IO[str] | None = None
        self._loggers: list[Logger] = []
        self._console: Console = Plain()
        self._first: tuple[int, float] | None = None
        """The first step of this call and when it was done, in seconds of the monotonic clock."""

    def begin(self, *, total_steps: int, start: int = 0) -> None:
        """Open the records.

        Args:
            total_steps: last step of the run, for the time that is left.
            start: step the run goes on from; records of later steps, left by an interruption, are cut off.

        Raises:
            IOFailure: the run folder cannot be written into.
        """
        self._total_steps = total_steps
        if not self._is_main:
            return
        path = self._run_dir / "metrics.jsonl"
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            cut_after(path, start)
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
            raise IOFailure(f"{path} cannot be written: {error.strerror}. Choose another --out.") from error
        self._console = open_console(total_steps, done=start)
        self._loggers = open_loggers(
            self._run_dir, tensorboard=self._tensorboard, resumed_step=start, say=self._console.line
        )

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for logger in self._loggers:
            logger.close()
        self._console.close()
        if self._file:
            self._file.close()
        self._loggers, self._console, self._file = [], Plain(), None

    def say(self, text: str) -> None:
        """Print a line for the user."""
        if self._is_main:
            self._console.line(text)

    def step(self, metrics: StepMetrics) -> None:
        """Record one optimizer step."""
        if self._echoes and metrics.step % self._every == 0:
            self._console.line(self._line(metrics))
        if not self._is_main:
            return
        if self._first is None:
            self._first = (metrics.step, time.monotonic())
        row = metrics.flat()
        self._record(row)
        if metrics.step % self._every == 0 or metrics.step in (self._first[0], self._total_steps):
            self._console.line(self._line(metrics))
            self._log(metrics.step, {k: v for k, v in row.items() if k != "step" and v is not None})
        self._console.advance(metrics.step)

    def evaluation(
        self,
        step: int,
        loss: float,
        figures: Mapping[str, float] | None = None,
        *,
        part: Literal["valid", "test"] = "valid",
    ) -> None:
        """Record what held-out data tell after ``step`` steps: ``valid_loss`` or ``test_loss``, and so the figures."""
        if not self._is_main:
            return
        found = {f"{part}_{name}": value for name, value in {"loss": loss, **(figures or {})}.items()}
        self._record({"step": step, **found})
        name = {"valid": "held-out", "test": "test"}[part]
        shown = [f"step {step}/{self._total_steps}", f"{name} loss {loss:.4f}", *_shown(figures or {})]
        self._console.line("  ".join(shown))
        self._log(step, found)

    def _record(self, row: dict[str, Any]) -> None:
        assert self._file is not None, "begin() comes first"
        # JSON has no NaN; a reader that stops at one would lose the whole file.
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps(clean) + "\n")

    def _log(self, step: int, values: dict[str, float]) -> None:
        for logger in self._loggers:
            logger.scalars(step, values)

    def _line(self, m: StepMetrics) -> str:
        if self._style == "megatron":
            return megatron_line(m, self._total_steps)
        parts = [
            f"step {m.step}/{self._total_steps}",
            f"loss {m.loss:.4f}",
            *_shown(m.figures),
            f"lr {m.lr:.2e}",
            f"grad norm {m.grad_norm:.3f}",
            f"{m.tokens_per_s:,.0f} tokens/s",
        ]
        if m.tflops_per_device is not None:
            parts.append(f"{m.tflops_per_device:.3g} TFLOP/s/{self._device} (causal)")
        if m.mfu is not None:
            parts.append(f"MFU {m.mfu:.1%}")
        if m.loss_scale is not None:
            parts.append(f"loss scale {m.loss_scale:g} ({m.skipped} skipped)")
        parts.append(f"{m.memory_gib:.2f} GiB")
        left = self._time_left_s(m.step)
        if left is not None:
            parts.append(f"{duration(left)} left")
        return "  ".join(parts)

    def _time_left_s(self, step: int) -> float | None:
        # The first step warms up; it says nothing about the others.
        if self._first is None or not self._first[0] < step < self._total_steps:
            return None
        first, at_s = self._first
        return (time.monotonic() - at_s) / (step - first) * (self._total_steps - step)


def _shown(figures: Mapping[str, float]) -> list[str]:
    return [f"{shown} {figures[name]:.3f}" for name, shown in _SHOWN.items() if name in figures]


def duration(seconds: float) -> str:
    """``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def cut_after(path: Path, step: int) -> None:
    """Drop the rows of later steps, and a last row that was cut short, from a ``metrics.jsonl``.

    Args:
        path: the file; nothing happens if it is not there.
        step: last step that is kept; 0 empties the file, since a run that starts anew has no history.
    """
    if not path.exists():
        return
    kept = []
    if step:
        for line in path.read_bytes().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            # The state after ``step`` is evaluated anew, so its held-out losses would stand there twice.
            last = step - 1 if isinstance(row, dict) and row.keys() & {"valid_loss", "test_loss"} else step
            if isinstance(row, dict) and row.get("step", step + 1) <= last:
                kept.append(line)
    write_atomic(path, b"".join(line + b"\n" for line in kept))
