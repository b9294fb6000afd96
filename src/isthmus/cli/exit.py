"""Turns every exception into one line on stderr and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from isthmus.errors import IOFailure, IsthmusError, explain


@dataclass(frozen=True, slots=True)
class Ending:
    exit_code: int
    message: str = ""
    traceback: str = ""


def ending_of(run: Callable[[], int | None]) -> Ending:
    """Call ``run``; success and plain exit codes have no message."""
    try:
        return Ending(run() or 0)
    except SystemExit as request:
        if isinstance(request.code, str):
            return Ending(1, request.code)
        return Ending(request.code or 0)
    except BrokenPipeError:
        # The reader closed the pipe. Neither this code nor the interpreter may write to it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return Ending(IOFailure.exit_code)
    except BaseException as error:  # some errors of torch are not an Exception
        code, message = explain(error)
        return Ending(code, message, traceback.format_exc())


def say(ending: Ending, *, debug: bool) -> None:
    """Print the message to stderr, with ``debug`` the traceback first."""
    if debug and ending.traceback:
        print(ending.traceback, file=sys.stderr)
    if ending.message:
        print(f"isthmus: {ending.message}", file=sys.stderr, flush=True)


def keep_traceback(ending: Ending, run_folder: Path | None) -> Ending:
    """Write the traceback of an unexpected error into the run folder, if any; the message names the file."""
    if ending.exit_code != IsthmusError.exit_code or not ending.traceback:
        return ending
    if run_folder is None or not (run_folder / "config.yaml").is_file():
        return ending
    path = run_folder / "error.txt"
    try:
        path.write_text(ending.traceback, encoding="utf-8")
    except OSError:
        return ending
    message = ending.message.replace("--debug shows the traceback", f"the traceback is in {path}")
    return replace(ending, message=message)
