"""Runs the command line in this process, which was started by a user, torchrun, Slurm or ``--nproc``.

Every exception becomes one line on stderr and an exit code.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isthmus.cli.terminal import note
from isthmus.config.deprecated_names import DeprecatedName
from isthmus.errors import IsthmusError, Preempted, UsageError, explain, printable
from isthmus.platforms import rank_env
from isthmus.train.terminal_lines import width_of, wrapped

argv: list[str] = []
"""The arguments after ``isthmus``."""
run_folder: Path | None = None
"""Set once the config is known."""
default_out: str | None = None
"""Set if the command has no ``--out``."""
started_by_isthmus = False
parse: Callable[[Sequence[str]], int]
"""Runs a command line; of the last call of :func:`run_alone`."""
_show_other_warning = warnings.showwarning


def naming_default_out(message: str) -> str:
    """The message of a run that can be resumed: without ``--out`` the same command would start another run."""
    if default_out is None:
        return message
    return re.sub(r"(?i)\b(the same command( again)?)\b", rf"\1 with --out {default_out}", message)


def print_deprecations() -> None:
    """Print warnings about deprecated names in one line, by one process of a run."""
    warnings.showwarning = _show_warning


def _show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    if not issubclass(category, DeprecatedName):
        _show_other_warning(message, category, *place, **more)
    elif not started_by_isthmus and rank_env.rank() <= 0:
        note(f"deprecated: {message}")


def run_alone(words: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Run the command line in a process that prints its own errors."""
    global argv, parse
    argv, parse = list(words), run
    debug = "--debug" in words
    status = exit_status_of(lambda: run(words))
    if status.exit_code == 0:
        return 0
    status = replace(status, message=naming_default_out(status.message))
    try:
        is_rank = rank_env.world_size() > 1 and rank_env.rank() >= 0
    except UsageError:  # the variables of a rank are invalid
        is_rank = False
    if not is_rank:
        print_error(save_traceback(status, run_folder), debug=debug)
        return status.exit_code
    from isthmus.launch.rendezvous import report

    line = report(status.exit_code, status.message, status.traceback)
    if line or debug:
        print_error(save_traceback(ExitStatus(status.exit_code, line, status.traceback), run_folder), debug=debug)
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(status.exit_code)  # the interpreter may wait for threads that wait for a rank that has ended


def run_rank(words: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Run the command line in a rank of ``--nproc``, which reports its error to the launcher."""
    global argv, started_by_isthmus
    from isthmus.launch.first_failure import Failure
    from isthmus.launch.local_launcher import exit_with_parent
    from isthmus.train.stop import StopFlag

    stop_file = rank_env.stop_file()
    assert stop_file is not None
    # Before torch is imported: a signal during the import is handled in the training loop, not by ending this process.
    stop = StopFlag()
    stop.install()
    exit_with_parent()
    if stop_file.exists():
        stop.request()
    argv, started_by_isthmus = list(words), True
    status = exit_status_of(lambda: run(words))
    if status.exit_code == 0:
        return 0
    Failure(exit_code=status.exit_code, message=status.message, traceback=status.traceback).write()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Exit at once: the interpreter may wait for threads that wait for a rank that has ended. A rank that saved counts
    # as successful, or torch elastic would stop the others while they save.
    os._exit(0 if status.exit_code == Preempted.exit_code else status.exit_code)


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
        try:
            sys.stdout.flush()
        except OSError:  # such as a full disk: the interpreter would fail on it again, with exit code 120
            _discard_output()
        return ExitStatus(code, message, traceback.format_exc())


def _output_closed() -> ExitStatus:
    """The reader of stdout closed it: the exit code is that of a program which SIGPIPE ends."""
    _discard_output()
    return ExitStatus(128 + signal.SIGPIPE)


def _discard_output() -> None:
    """Neither this code nor the interpreter may write to stdout again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


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
