"""Turns every exception into one line on stderr and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from isthmus.errors import IOFailure, IsthmusError, NoSpace

INTERRUPTED = 130


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


def explain(error: BaseException) -> tuple[int, str]:
    if isinstance(error, IsthmusError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted; unsaved progress is lost."
    if hasattr(error, "format_message"):  # from typer, for a wrong command line
        return 2, f"{_sentence(error.format_message())} See isthmus --help."
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename is not None else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return NoSpace.exit_code, f"{where}no space is left. Free some, or write to another disk."
        return IOFailure.exit_code, f"{where}{error.strerror}."
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        hint = "Lower train.micro_batch_size or data.seq_length, raise parallel.tp, or set train.recompute=full."
        return IsthmusError.exit_code, f"out of memory. {hint}"
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return IsthmusError.exit_code, f"{line} (unexpected; --debug shows the traceback)"


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


def _sentence(text: str) -> str:
    line = " ".join(text.split())
    return line[:1].lower() + line[1:] + ("" if line.endswith((".", "?", ")")) else ".")
