"""Lines on stderr: above a progress bar on a terminal, plain elsewhere."""

from __future__ import annotations

import sys
from contextlib import suppress

_CLOSED = (OSError, ValueError)
"""Errors of a terminal or pipe that was closed; they do not end a run."""


class Console:
    """Prints lines, each flushed."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def show_progress(self, total_steps: int, done: int = 0) -> None:
        """Show a progress bar, if stderr is a terminal."""
        if sys.stderr.isatty():
            self._progress = Progress(total_steps, done)

    def print(self, text: str) -> None:
        """Print a line."""
        with suppress(*_CLOSED):
            if self._progress is None:
                print(text, file=sys.stderr, flush=True)
            else:
                self._progress.print(text)

    def advance(self, step: int) -> None:
        """Move the progress bar to ``step``."""
        if self._progress is not None:
            self._progress.advance(step)

    def close(self) -> None:
        """Remove the progress bar."""
        progress, self._progress = self._progress, None
        if progress is not None:
            with suppress(*_CLOSED):
                progress.close()


class Progress:
    """A bar with the time left; lines scroll above it."""

    def __init__(self, total_steps: int, done: int = 0) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=RichConsole(stderr=True, highlight=False),
            transient=True,
        )
        self._task = self._bar.add_task("training", total=total_steps, completed=done)
        self._bar.start()

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(text, markup=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        """Move the bar to ``step``."""
        self._bar.update(self._task, completed=step)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.stop()
