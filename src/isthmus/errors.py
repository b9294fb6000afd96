"""What can go wrong, said once: every error a user can meet, with the exit code of the process it ends.

An error message says what is wrong, what was got, what was wanted and what to do, in one line.
The codes follow sysexits.h where it has one; they are listed in docs/reference/exit-codes.md.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path


class IsthmusError(Exception):
    """Base of all errors that are meant for the user; shown as one line, with a traceback only under ``--debug``."""

    exit_code = 70


class CheckFailed(IsthmusError):
    """A check that the user asked for found a difference."""

    exit_code = 1


class UsageError(IsthmusError):
    """The configuration or the command line asks for something that cannot be."""

    exit_code = 2


class DataError(IsthmusError):
    """A data file, model file or checkpoint is corrupt, cut short or of an unknown form."""

    exit_code = 65


class MissingInput(IsthmusError):
    """A file or folder that the run needs is not there."""

    exit_code = 66


class NoSpace(IsthmusError):
    """The output cannot be created: it exists already, or the disk has no room."""

    exit_code = 73


class IOFailure(IsthmusError):
    """Reading or writing failed for a reason other than space."""

    exit_code = 74


class Preempted(IsthmusError):
    """The run was asked to stop. The same command resumes from the checkpoint, or starts again if there is none."""

    exit_code = 75


class Hang(IsthmusError):
    """A peer did not answer within the time limit."""

    exit_code = 76


class UnsafeInput(IsthmusError):
    """The input would run code or write outside its folder."""

    exit_code = 77


class Diverged(IsthmusError):
    """The loss or the gradient is not a finite number, or the gradient is zero and nothing is learned."""

    exit_code = 79


def error_of(exit_code: int, message: str) -> IsthmusError:
    """The error of a class with this exit code, as another process reported it."""
    classes: dict[int, type[IsthmusError]] = {kind.exit_code: kind for kind in IsthmusError.__subclasses__()}
    error = classes.get(exit_code, IsthmusError)(message)
    error.exit_code = exit_code
    return error


@contextlib.contextmanager
def disk_errors(path: Path, need_bytes: int | None = None) -> Iterator[None]:
    """Turn an OSError that occurs while writing at ``path`` into one for the user.

    Raises:
        NoSpace: the disk or the quota is full; with what is needed and what is free.
        IOFailure: any other reason.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise IOFailure(f"{path} cannot be written: {error.strerror or error}.") from error
        free_gib = shutil.disk_usage(path if path.exists() else path.parent).free / 2**30
        need = f"{need_bytes / 2**30:.2f} GiB needed, " if need_bytes is not None else ""
        raise NoSpace(f"no space left to write {path}: {need}{free_gib:.2f} GiB free. Make room.") from error
