"""The folders of checkpoints: ``iter_0000010`` next to ``latest_checkpointed_iteration.txt``, as in Megatron-LM."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException  # no subclass of Exception

from isthmus.engine.checkpoint.tracker import RECORD, TRACKER, check_tracker
from isthmus.errors import DataError, IOFailure, IsthmusError, NoSpace, UnsafeInput, errno_of, is_lost_rank
from isthmus.files.atomic_write import TEMPORARY, rename, write_atomic

_FOLDER = re.compile("iter_[0-9]{7,18}")


def checkpoint_dir(root: Path, step: int) -> Path:
    return root / f"iter_{step:07d}"


def latest(root: Path) -> Path | None:
    """The newest published checkpoint, or None.

    Raises:
        DataError: the tracker file is damaged, names a missing checkpoint, or another one than was published last.
    """
    tracker = root / TRACKER
    if not tracker.exists():
        return None
    step = _step_in(tracker)
    if step is None or not checkpoint_dir(root, step).is_dir():
        text = tracker.read_text(encoding="utf-8", errors="replace").strip()
        raise DataError(
            f"{tracker} contains {text[:40]!r}, which is not a checkpoint in {root}. Choose one with "
            f"checkpoint.resume={root}/iter_NNNNNNN."
        )
    check_tracker(root, step)
    return checkpoint_dir(root, step)


def publish(staging: Path, final: Path, step: int, keep: int, best: int | None = None) -> None:
    """Rename a complete folder, name it in the tracker, and remove old checkpoints beyond ``keep``; not ``best``."""
    replaced = final.with_name(f"{TEMPORARY}replaced-{final.name}")
    if final.exists():  # of a branch that this run abandoned
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    rename(staging, final)
    _set_latest(final.parent, step)
    shutil.rmtree(replaced, ignore_errors=True)
    remove_old(final.parent, step, keep, best)


def remove_old(root: Path, step: int, keep: int, best: int | None = None) -> None:
    """Keep the newest ``keep`` checkpoints, of which that of ``step`` is the last one, and ``best``."""
    folders = {int(path.name[5:]): path for path in root.iterdir() if _FOLDER.fullmatch(path.name)}
    for old in steps_to_remove(folders, step, keep, best):
        removed = folders[old].with_name(f"{TEMPORARY}old-{folders[old].name}")
        with suppress(OSError):
            folders[old].rename(removed)  # a kill leaves no folder that looks like a checkpoint
        shutil.rmtree(removed, ignore_errors=True)


def steps_to_remove(steps: Iterable[int], step: int, keep: int, best: int | None = None) -> list[int]:
    """The checkpoints beyond the newest ``keep``, of which that of ``step`` is the last one; not ``best``."""
    # A run resumed from an earlier step leaves folders with higher numbers, which are older: they are removed first.
    others = sorted(set(steps) - {step, best}, key=lambda other: (other < step, other))
    return others[: max(0, len(others) + 1 - keep)]


def _set_latest(root: Path, step: int) -> None:
    """The record has every step that the tracker may name, also after a kill between the writes."""
    tracker, record = root / TRACKER, root / RECORD
    before = _step_in(tracker) if tracker.is_file() else None
    if before is not None:
        write_atomic(record, json.dumps({"steps": [before, step]}))
    write_atomic(tracker, str(step))
    write_atomic(record, json.dumps({"steps": [step]}))


def _step_in(tracker: Path) -> int | None:
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


@contextmanager
def write_errors(stage: Path) -> Iterator[None]:
    """Translate errors to NoSpace, IOFailure or IsthmusError; not those of collectives because of a lost rank."""
    try:
        yield
    except IsthmusError:
        raise
    except (Exception, CheckpointException) as error:
        if is_lost_rank(error):
            raise
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
    """Translate errors to IOFailure, UnsafeInput or DataError, as :func:`write_errors`; the files are complete."""
    try:
        yield
    except IsthmusError:
        raise
    except OSError as error:
        raise IOFailure(f"{folder} cannot be read: {error.strerror or error}.") from error
    except (Exception, CheckpointException) as error:
        if is_lost_rank(error):
            raise
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
