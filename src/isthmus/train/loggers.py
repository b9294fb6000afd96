"""Where numbers go besides ``metrics.jsonl``; what is not installed is said once and done without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol


class Logger(Protocol):
    """Takes the numbers of a step."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record named numbers of one step."""

    def close(self) -> None:
        """Write out what is still held."""


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
        """Record named numbers of one step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is still held."""
        self._writer.close()


def open_loggers(run_dir: Path, *, tensorboard: bool, resumed_step: int, say: Callable[[str], None]) -> list[Logger]:
    """The loggers that the run asks for and that are installed here; ``say`` is told about one that is not."""
    loggers: list[Logger] = []
    if tensorboard:
        try:
            loggers.append(TensorBoard(run_dir, resumed_step=resumed_step))
        except ImportError:
            say(
                "TensorBoard is not installed: only metrics.jsonl is written. "
                "Install isthmus[tensorboard], or set logging.tensorboard=false."
            )
    return loggers
