"""Turns every exception into one line on stderr and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from isthmus.errors import IsthmusError, explain, printable
from isthmus.train.terminal_lines import width_of, wrapped


@dataclass(frozen=True, slots=True)
class ExitStatus:
    exit_code: int
    message: str = ""
    traceback: str = ""


def exit_status_of(run: Callable[[], int | None]) -> ExitStatus:
    """Call ``run``; success and plain exit codes have no message."""
    try:
        exit_code = run() or 0
        sys.stdout.flush()  # at the end of the interpreter it would be a warning
        return ExitStatus(exit_code)
    except SystemExit as request:
        if isinstance(request.__context__, BrokenPipeError):  # typer exits with 1
            return _output_closed()
        if isinstance(request.code, str):
            return ExitStatus(1, request.code)
        return ExitStatus(request.code or 0)
    except BrokenPipeError:
        return _output_closed()
    except BaseException as error:  # some errors of torch are not an Exception
        code, message = explain(error)
        return ExitStatus(code, message, traceback.format_exc())


def _output_closed() -> ExitStatus:
    """The reader of stdout closed it: the exit code is that of a program which SIGPIPE ends."""
    # Neither this code nor the interpreter may write to it again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return ExitStatus(128 + signal.SIGPIPE)


def open_closed_streams() -> None:
    """Open what the parent has closed, as with ``2>&-``: the next file would get its number, and what is printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)


def print_error(status: ExitStatus, *, debug: bool) -> None:
    """Print the message to stderr, with ``debug`` the traceback first."""
    with suppress(OSError):  # closed by its reader; the exit code still tells
        if debug and status.traceback:
            print(printable(status.traceback), file=sys.stderr)
        if status.message:
            text = wrapped(f"isthmus: {printable(status.message)}", width_of(sys.stderr))
            print(text, file=sys.stderr, flush=True)


def save_traceback(status: ExitStatus, run_folder: Path | None) -> ExitStatus:
    """Write the traceback of an unexpected error into the run folder, if any; the message names the file."""
    if status.exit_code != IsthmusError.exit_code or not status.traceback:
        return status
    if run_folder is None or not (run_folder / "config.yaml").is_file():
        return status
    path = run_folder / "error.txt"
    try:
        path.write_text(printable(status.traceback), encoding="utf-8")
    except OSError:
        return status
    message = status.message.replace("--debug shows the traceback", f"the traceback is in {path}")
    return replace(status, message=message)
