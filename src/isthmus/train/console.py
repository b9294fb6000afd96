"""Lines on stderr: above a progress bar on a terminal, plain elsewhere."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_CLOSED = (OSError, ValueError)
"""Errors of a closed terminal or pipe; they do not end a run."""


class Console:
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
