"""Lines on stderr, and on a terminal a live line below them: progress, remaining time and the newest metrics."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TextIO

from isthmus.engine.trace_region import current_region
from isthmus.errors import printable
from isthmus.train.metrics import StepMetrics, duration, step_cell
from isthmus.train.silence_notices import SilenceNotices
from isthmus.train.terminal_lines import width_of, wrapped

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

ProgressStyle = Literal["auto", "bar", "lines"]
_CLOSED = (OSError, ValueError)
"""Errors of a closed terminal or pipe; they do not end a run."""
_SHORTEST_BAR = 10
"""Columns."""
_REFRESHES_PER_S = 4.0
_CTRL_C = len("^C") + 1
"""Columns right of the bar for what a terminal echoes: on the next line, it would leave the bar on the screen."""


class Console:
    """Lines on stderr: above a progress bar on a terminal, plain elsewhere."""

    def __init__(self, style: ProgressStyle = "auto") -> None:
        """``bar`` shows the bar where no terminal is detected, too; ``lines`` never shows it."""
        self._style = style
        self._bar: tuple[Progress, TaskID] | None = None
        self._redirected: list[tuple[logging.StreamHandler[Any], TextIO]] = []
        self._validation = ""
        self._notices = SilenceNotices(self._print_notice)

    def start(self) -> None:
        """Say what is done after a long time without a line, until :meth:`close`."""
        self._notices.start()

    def show_progress(self, total_steps: int, done: int = 0) -> None:
        """Show a progress bar if stderr is a terminal that can redraw a line, outside of CI."""
        if self._style == "lines" or (self._style == "auto" and not _can_redraw()):
            return
        from rich.console import Console as RichConsole
        from rich.console import ConsoleDimensions
        from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
        from rich.table import Column
        from rich.text import Text

        class Phase(ProgressColumn):
            def render(self, task: Task) -> Text:
                region = current_region().partition(": ")[0]
                return Text(task.description if region.startswith("step") else region or task.description)

        class Terminal(RichConsole):
            @property  # type: ignore[misc]  # nobody sets it
            def size(self) -> ConsoleDimensions:
                width, height = super().size
                return ConsoleDimensions(max(1, width - _CTRL_C), height)

            def show_cursor(self, show: bool = True) -> bool:
                """No-op: it would stay hidden after a kill, which no process can handle."""
                return False

        stderr = sys.stderr
        progress = Progress(
            Phase(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True), markup=False),
            console=Terminal(stderr=True, highlight=False, force_terminal=True if self._style == "bar" else None),
            refresh_per_second=_REFRESHES_PER_S,
            redirect_stdout=sys.stdout.isatty(),  # results in a pipe stay there
            transient=True,
            expand=True,
        )
        task = progress.add_task("training", total=total_steps, completed=done, figures=step_cell(done, total_steps))
        self._bar = (progress, task)
        progress.start()
        for handler in _handlers():
            if handler.stream is stderr:  # else its lines would be written into the bar
                self._redirected.append((handler, stderr))
                handler.setStream(sys.stderr)

    def print(self, text: str, *, of_step: bool = False) -> None:
        self._notices.line_printed(of_step=of_step)
        self._print(text)

    def _print_notice(self, text: str) -> None:
        if self._bar is None:  # the bar names the open region
            self._print(text)

    def _print(self, text: str) -> None:
        text = printable(text)
        with suppress(*_CLOSED):
            if self._bar is None:
                print(wrapped(text, width_of(sys.stderr)), file=sys.stderr, flush=True)
            else:
                console = self._bar[0].console
                console.print(wrapped(text, console.width + _CTRL_C), markup=False, soft_wrap=True)

    def advance(self, metrics: StepMetrics, total_steps: int, left_s: float | None) -> None:
        """Show a step; ``left_s`` is the remaining time in seconds."""
        if self._bar is None:
            return
        progress, task = self._bar
        width = progress.console.width - len("training") - _SHORTEST_BAR - 2
        figures = live_figures(metrics, total_steps, left_s, self._validation, width)
        progress.update(task, completed=metrics.step, figures=figures)

    def validated(self, loss: float) -> None:
        """Show the newest validation loss from here on."""
        self._validation = f"valid {loss:.4f}"

    def close(self) -> None:
        """Remove the bar."""
        self._notices.close()
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected.clear()
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(*_CLOSED):
                bar[0].stop()


def live_figures(m: StepMetrics, total_steps: int, left_s: float | None, validation: str, width: int) -> str:
    """What stands right of the bar, in at most ``width`` columns: cells that do not fit are omitted, the last first."""
    cells = [step_cell(m.step, total_steps), f"loss {m.loss:.4f}"]
    cells += [] if left_s is None else [f"{duration(left_s)} left"]
    cells.append(f"{m.tokens_per_s:,.0f} tok/s")
    cells += [validation] if validation else []
    cells += [] if m.mfu is None else [f"MFU {m.mfu:.1%}"]
    cells.append(f"{m.memory_gib:.1f} GiB")
    while len(cells) > 1 and len("  ".join(cells)) > width:
        cells.pop()
    return "  ".join(cells)


def _can_redraw() -> bool:
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not in_ci


def _handlers() -> Iterator[logging.StreamHandler[Any]]:
    """Handlers of all loggers that write to a stream."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler):
                yield handler
