"""The errors for users, with the exit code of the process.

An error message is one line: what is wrong, the actual and the expected value, and what to do.
The codes follow sysexits.h where it has one; they are listed in docs/reference/exit-codes.md.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

_MAX_MESSAGE = 20_000


class IsthmusError(Exception):
    """Base of all errors that are meant for the user; shown as one line, with a traceback only under ``--debug``."""

    exit_code = 70


class CheckFailed(IsthmusError):
    """A check that the user asked for found a difference."""

    exit_code = 1


class UsageError(IsthmusError):
    """The configuration or the command line is invalid or not supported."""

    exit_code = 2


class DataError(IsthmusError):
    """A data file, model file or checkpoint is damaged, truncated or of an unknown format."""

    exit_code = 65


class MissingInput(IsthmusError):
    """A file or folder that the run needs does not exist."""

    exit_code = 66


class OutputError(IsthmusError):
    """The output cannot be created. Base of the reasons for it."""

    exit_code = 73


class NoSpace(OutputError):
    """The disk or the quota is full."""


class OutputExists(OutputError):
    """The output exists already, or its place is taken by other files."""


class OutputInUse(OutputError):
    """Another process writes the output."""


class IOFailure(IsthmusError):
    """Reading or writing failed for a reason other than space."""

    exit_code = 74


class Preempted(IsthmusError):
    """The run was asked to stop. The same command resumes from the checkpoint, or starts again if there is none."""

    exit_code = 75


class Hang(IsthmusError):
    """Another rank or process did not answer within the time limit."""

    exit_code = 76


class UnsafeInput(IsthmusError):
    """The input would run code or write outside its folder."""

    exit_code = 77


class Diverged(IsthmusError):
    """The loss or the gradient is not finite, or the gradient is zero."""

    exit_code = 79


def error_of(exit_code: int, message: str) -> IsthmusError:
    """An error that another process reported."""
    classes: dict[int, type[IsthmusError]] = {kind.exit_code: kind for kind in IsthmusError.__subclasses__()}
    error = classes.get(exit_code, IsthmusError)(message)
    error.exit_code = exit_code
    return error


def explain(error: BaseException) -> tuple[int, str]:
    """Exit code and message of any exception."""
    if isinstance(error, IsthmusError):
        return error.exit_code, _clipped(str(error))
    if isinstance(error, KeyboardInterrupt):
        return 130, str(error) or "interrupted; unsaved progress is lost."
    if hasattr(error, "format_message"):  # from typer, for a wrong command line
        return 2, f"{_sentence(error.format_message())} See isthmus --help."
    if (number := errno_of(error)) is not None:
        filename = getattr(error, "filename", None)
        where = "" if filename is None else f"{filename}: "
        if number in _FULL:
            return NoSpace.exit_code, f"{where}no space is left. Free some, or write to another disk."
        return IOFailure.exit_code, f"{where}{getattr(error, 'strerror', None) or error}."
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        hint = "Lower train.micro_batch_size or data.seq_length, raise parallel.tp, or set train.recompute=full."
        return IsthmusError.exit_code, f"out of memory. {hint}"
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return IsthmusError.exit_code, f"{line} (unexpected; --debug shows the traceback)"


_FULL = (errno.ENOSPC, errno.EDQUOT)
_QUOTED = {os.strerror(number): number for number in (*_FULL, errno.EIO, errno.EFBIG, errno.EROFS, errno.ESTALE)}


def errno_of(error: BaseException) -> int | None:
    """The number of the system's error that ``error`` is or quotes; None for others.

    Libraries in C++ and Rust raise plain exceptions. ``torch.save`` and NumPy do not tell why a write failed: EIO.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    text = str(error)
    if match := re.search(r"\(os error (\d+)\)", text):
        return int(match[1])
    if re.search(r"iostream error|unexpected pos \d+|\d+ requested and \d+ written", text):
        return errno.EIO
    return next((number for quoted, number in _QUOTED.items() if quoted in text), None)


_NO_ANSWER = re.compile(r"\bgloo\b|connection (closed|reset|refused)|timed out|timeout|broken pipe", re.I)


_CREDENTIALS = re.compile(r"(?:(?<=://)|(?<=http:/)|(?<=https:/))[^/\s]+@")
"""User and password of a URL, also where it was read as a path, which has one slash."""
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Without tab and end of line; with those that change the direction of text."""


def printable(text: str) -> str:
    """A message for a terminal: control characters, as in names, are escaped, and credentials in URLs hidden."""
    return escaped(_CREDENTIALS.sub("***@", text))


def escaped(text: str) -> str:
    """Text for a terminal, in which control characters are escaped; names in files may have them."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def counted(number: int | float, noun: str) -> str:
    """A number with its noun: 1 step, 1,000 steps."""
    return f"{number:,.10g} {noun}" if number == 1 else f"{number:,.10g} {noun}s"


def is_lost_rank(error: BaseException | None) -> bool:
    """Whether a collective failed with ``error`` because another rank ended or does not answer."""
    is_dist_error = any(kind.__name__ == "DistError" for kind in type(error).__mro__)  # of torch.distributed
    return isinstance(error, RuntimeError) and (is_dist_error or _NO_ANSWER.search(str(error)) is not None)


@contextlib.contextmanager
def disk_errors(path: Path, need_bytes: int | None = None) -> Iterator[None]:
    """Turn an error of the system that occurs while writing at ``path`` into one for the user.

    Raises:
        NoSpace: the disk or the quota is full; names the needed and the free space.
        IOFailure: any other reason.
    """
    try:
        yield
    except IsthmusError:
        raise
    except Exception as error:
        if (number := errno_of(error)) is None and not isinstance(error, OSError):
            raise
        free = shutil.disk_usage(next(folder for folder in (path, *path.absolute().parents) if folder.exists())).free
        if number not in _FULL and free > 2**20:
            raise IOFailure(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}.") from error
        need = f"{need_bytes / 2**30:.2f} GiB needed, " if need_bytes is not None else ""
        raise NoSpace(f"no space left to write {path}: {need}{free / 2**30:.2f} GiB free. Make room.") from error


def _clipped(text: str) -> str:
    """A hostile name or value in a message may have millions of characters."""
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]} ... ({len(text)} characters)"


def _sentence(text: str) -> str:
    line = " ".join(text.split())
    return line[:1].lower() + line[1:] + ("" if line.endswith((".", "?", ")")) else ".")
