"""Experiment trackers that get the metrics besides ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from isthmus.config.schema import LoggingConfig


class Logger(Protocol):
    """Receives the metrics of a step."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record named metrics of one step."""

    def close(self) -> None:
        """Write what is buffered."""


class TensorBoard:
    """Event files in ``<run>/tensorboard``."""

    def __init__(self, run_dir: Path, *, resumed_step: int = 0) -> None:
        """Open the event file.

        Args:
            run_dir: the run folder.
            resumed_step: events of later steps, left by the interrupted run, are hidden.

        Raises:
            ImportError: tensorboard is not installed.
        """
        from torch.utils.tensorboard.writer import SummaryWriter

        writer: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resumed_step + 1 if resumed_step else None)  # type: ignore[no-untyped-call]
        self._writer = writer

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record named metrics of one step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


def open_loggers(
    run_dir: Path, settings: LoggingConfig, *, resumed_step: int, log: Callable[[str], None]
) -> list[Logger]:
    """The trackers that the run asks for; one that is not installed is reported to ``log`` and left out."""
    if not settings.tensorboard:
        return []
    try:
        return [TensorBoard(run_dir, resumed_step=resumed_step)]
    except ImportError:
        log(
            "TensorBoard is not installed: only metrics.jsonl is written. "
            "Install isthmus[tensorboard], or set logging.tensorboard=false."
        )
        return []
