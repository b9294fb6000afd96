"""The folders of checkpoints: ``iter_0000010`` next to ``latest_checkpointed_iteration.txt``, as in Megatron-LM."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException  # no subclass of Exception

from isthmus.atomic_write import rename, write_atomic
from isthmus.engine.checkpoint.checkpoint_names import TRACKER
from isthmus.engine.checkpoint.index_file import INDEX, read_index
from isthmus.errors import DataError, IOFailure, IsthmusError, MissingInput, NoSpace, UnsafeInput, errno_of


def checkpoint_dir(root: Path, step: int) -> Path:
    return root / f"iter_{step:07d}"


def latest(root: Path) -> Path | None:
    """The newest published checkpoint, or None; raises DataError if the tracker file names a missing one."""
    tracker = root / TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if re.fullmatch("[0-9]{1,18}", text) is None or not checkpoint_dir(root, int(text)).is_dir():
        raise DataError(
            f"{tracker} contains {text!r}, which is not a checkpoint in {root}. Write an existing step into it."
        )
    return checkpoint_dir(root, int(text))


def publish(staging: Path, final: Path, step: int, keep: int, best: int | None = None) -> None:
    shutil.rmtree(final, ignore_errors=True)
    rename(staging, final)
    write_atomic(final.parent / TRACKER, str(step))
    # A run resumed from an earlier step leaves folders with higher numbers, which are older: they are removed first.
    kept = {final} if best is None else {final, checkpoint_dir(final.parent, best)}
    others = sorted(
        (path for path in final.parent.glob("iter_*") if path not in kept), key=lambda path: (path < final, path)
    )
    for old in others[: max(0, len(others) + 1 - keep)]:
        shutil.rmtree(old, ignore_errors=True)


def check_files(folder: Path) -> None:
    """Check that all files exist and have the length in the index.

    Raises:
        MissingInput: the folder or its index is missing.
        DataError: a file is missing or truncated, or the index is unreadable.
        UnsafeInput: the index would run code.
    """
    if not (folder / INDEX).is_file():
        raise MissingInput(
            f"{folder} has no torch_dist checkpoint: .metadata is missing. Choose a folder that has one."
        )
    if not (folder / "common.pt").is_file():
        raise DataError(f"{folder / 'common.pt'} is missing. Resume from another checkpoint.")
    ends: dict[str, int] = {}
    for entry in read_index(folder).storage_data.values():
        ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
    for name, end in ends.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else -1
        if size < end:
            found = "is missing" if size < 0 else f"has {size} bytes"
            raise DataError(f"{folder / name} {found}, {end} are needed. Resume from another checkpoint.")


@contextmanager
def write_errors(stage: Path) -> Iterator[None]:
    """Translate errors to NoSpace, IOFailure or IsthmusError."""
    try:
        yield
    except IsthmusError:
        raise
    except (Exception, CheckpointException) as error:
        number, text = errno_of(error), str(error)
        # torch's zip writer finds fewer bytes in the file than it wrote.
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "unexpected pos" in text:
            free = shutil.disk_usage(stage.parent).free / 2**30
            raise NoSpace(
                f"no room for the checkpoint in {stage.parent} ({free:.2f} GiB free). Free some, lower "
                "checkpoint.keep, or choose another --out; the checkpoint before it is intact."
            ) from error
        if number is not None or isinstance(error, OSError | CheckpointException):
            message = f"the checkpoint could not be written to {stage.parent}: {_lines(error)[-1]}"
            raise IOFailure(message) from error
        raise IsthmusError(f"saving to {stage.parent} failed: {type(error).__name__}: {text}") from error


@contextmanager
def read_errors(folder: Path) -> Iterator[None]:
    """Translate errors to IOFailure, UnsafeInput or DataError; the files are complete."""
    try:
        yield
    except OSError as error:
        raise IOFailure(f"{folder} cannot be read: {error.strerror or error}.") from error
    except (Exception, CheckpointException) as error:
        lines = _lines(error)
        message = lines[-1] if isinstance(error, CheckpointException) else lines[0]
        # torch lists every tensor of the checkpoint
        if "Weights only load failed" in str(error):  # of torch.load
            raise UnsafeInput(
                f"{folder} contains a pickle that names code, which no checkpoint of a run needs. Do not load it; "
                "resume from a checkpoint of your own."
            ) from error
        message = message if len(message) <= 200 else f"{message[:200]}..."
        raise DataError(
            f"{folder} cannot be loaded: it is damaged, or of another model ({message}). "
            "Resume from another checkpoint, or start a new run with --out."
        ) from error


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
