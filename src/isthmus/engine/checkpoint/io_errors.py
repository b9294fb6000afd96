"""Translation of checkpoint I/O errors of torch and Megatron-Core."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException  # no subclass of Exception

from isthmus.errors import DataError, IOFailure, IsthmusError, NoSpace

# "unexpected pos": torch's zip writer finds fewer bytes in the file than it wrote.
_SIGNS_OF_NO_SPACE = ("No space left", "Disk quota", "File too large", "ENOSPC", "unexpected pos")


@contextmanager
def write_errors(stage: Path) -> Iterator[None]:
    """Translate errors to NoSpace, IOFailure or IsthmusError."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        text = str(error)
        if any(sign in text for sign in _SIGNS_OF_NO_SPACE):
            free = shutil.disk_usage(stage.parent).free / 2**30
            raise NoSpace(
                f"no room for the checkpoint in {stage.parent} ({free:.2f} GiB free). Free some, lower "
                "checkpoint.keep, or choose another --out; the checkpoint before it is intact."
            ) from error
        if isinstance(error, OSError | CheckpointException):
            message = f"the checkpoint could not be written to {stage.parent}: {_lines(error)[-1]}"
            raise IOFailure(message) from error
        raise IsthmusError(f"saving to {stage.parent} failed: {type(error).__name__}: {text}") from error


@contextmanager
def read_errors(folder: Path) -> Iterator[None]:
    """Translate errors to IOFailure or DataError; the files are complete."""
    try:
        yield
    except OSError as error:
        raise IOFailure(f"{folder} cannot be read: {error.strerror or error}.") from error
    except (Exception, CheckpointException) as error:
        lines = _lines(error)
        message = lines[-1] if isinstance(error, CheckpointException) else lines[0]
        # torch lists every tensor of the checkpoint
        message = message if len(message) <= 200 else f"{message[:200]}..."
        raise DataError(
            f"{folder} cannot be loaded: it is damaged, or of another model ({message}). "
            "Resume from another checkpoint, or start a new run with --out."
        ) from error


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
