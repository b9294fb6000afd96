"""Runs the command line in this process, which a user, torchrun, Slurm or ``--nproc`` has started, and ends it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from isthmus.cli.exit import ending_of, keep_traceback, say
from isthmus.errors import Preempted

argv: list[str] = []
"""The words after ``isthmus``."""
run_folder: Path | None = None
"""Set once the config is known."""
started_by_isthmus = False
"""Whether this is a rank that ``--nproc`` has started."""


def run_alone(words: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Run the command line in a process that prints its own errors; returns the exit code."""
    global argv
    from isthmus.launch.speaker import speaks_first

    argv = list(words)
    debug = "--debug" in words
    ending = ending_of(lambda: run(words))
    if ending.exit_code == 0:
        return 0
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if world_size in ("", "0", "1"):
        say(keep_traceback(ending, run_folder), debug=debug)
        return ending.exit_code
    if debug or speaks_first():
        say(keep_traceback(ending, run_folder), debug=debug, prefix=f"rank {rank}: ")
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(ending.exit_code)  # the interpreter may wait for threads that wait for a rank that has ended


def run_rank(words: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Run the command line in a rank of ``--nproc``, which reports its error to the launcher; returns the exit code."""
    global argv, started_by_isthmus
    from isthmus.launch.first_failure import STOP_FILE, RankReport, reports_folder
    from isthmus.launch.rank_env import end_with_parent, rank
    from isthmus.launch.rank_watchdog import watch_peers
    from isthmus.train.stop import StopFlag

    folder = reports_folder()
    assert folder is not None
    # Before torch is imported: a signal during the import must wait for the training loop and not end this process.
    stop = StopFlag()
    stop.install()
    end_with_parent()
    watch_peers(folder, rank())
    if (folder / STOP_FILE).exists():
        stop.request()
    argv, started_by_isthmus = list(words), True
    ending = ending_of(lambda: run(words))
    report = RankReport(rank=rank(), exit_code=ending.exit_code, message=ending.message, traceback=ending.traceback)
    report.write(folder)
    if ending.exit_code == 0:
        return 0
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Exit at once: the interpreter may wait for threads that wait for a rank that has ended. A rank that saved counts
    # as successful, or torch elastic would stop the others while they save.
    os._exit(0 if ending.exit_code == Preempted.exit_code else ending.exit_code)
