"""What ``isthmus convert`` and ``isthmus verify`` share: their options, and the bar that shows how far they are."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

HfLike = Annotated[
    Path | None,
    typer.Option(
        metavar="HF_DIR", help="Model folder, or preset:NAME, whose config describes a checkpoint that brings none."
    ),
]
Bin = Annotated[
    bool,
    typer.Option(
        "--bin",
        help="Read pytorch_model*.bin instead of safetensors. Only when asked: they are pickles, which can hold code. "
        "None of it is run, a file that holds any is refused; still, prefer safetensors where the model has them.",
    ),
]


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with bytes and rate on a terminal's stderr, nothing elsewhere; yields what tells it (done, total)."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def cleared_away() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a hang-up end the block, and nothing disturbs it while it clears away what it has written."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(*_: object) -> None:
        for number in numbers:  # batch systems send it twice, and so do users
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
