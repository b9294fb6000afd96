"""Lines for the user on stderr: under a progress bar on a terminal, plain elsewhere."""

from __future__ import annotations

import sys
from typing import Protocol


class Console(Protocol):
    """Where the user reads along."""

    def line(self, text: str) -> None:
        """Print a line."""

    def advance(self, step: int) -> None:
        """Move the progress to ``step``."""

    def close(self) -> None:
        """Leave the screen tidy."""


class Plain:
    """One line after the other, each flushed: for log files and pipes."""

    def line(self, text: str) -> None:
        """Print a line; a reader that went away is no reason to stop the run."""
        try:
            print(text, file=sys.stderr, flush=True)
        except (OSError, ValueError):
            pass

    def advance(self, step: int) -> None:
        """Nothing to move."""

    def close(self) -> None:
        """Nothing to tidy."""


class Terminal:
    """Lines scroll above a bar with the time that is left."""

    def __init__(self, total_steps: int, *, done: int = 0) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=RichConsole(stderr=True, highlight=False),
            transient=True,
        )
        self._task = self._progress.add_task("training", total=total_steps, completed=done)
        self._progress.start()

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        try:
            self._progress.console.print(text, markup=False, soft_wrap=True)
        except (OSError, ValueError):
            pass

    def advance(self, step: int) -> None:
        """Move the bar to ``step``."""
        self._progress.update(self._task, completed=step)

    def close(self) -> None:
        """Take the bar off the screen."""
        try:
            self._progress.stop()
        except (OSError, ValueError):
            pass


def open_console(total_steps: int, *, done: int = 0) -> Console:
    """A bar if stderr is a terminal, plain lines otherwise."""
    return Terminal(total_steps, done=done) if sys.stderr.isatty() else Plain()
