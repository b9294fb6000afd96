"""Runs the command line in this process, which was started by a user, torchrun, Slurm or ``--nproc``."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from isthmus.cli.default_out import naming_folder
from isthmus.cli.exit import ExitStatus, exit_status_of, print_error, save_traceback
from isthmus.cli.terminal import note
from isthmus.config.deprecated_names import DeprecatedName
from isthmus.errors import Preempted, UsageError
from isthmus.platforms import rank_env

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
    """The message of a run, which the same command does not resume if it has no ``--out``."""
    return message if default_out is None else naming_folder(message, default_out)


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
