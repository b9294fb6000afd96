"""The command line in a rank that ``--nproc`` started: it speaks through its report, not to the user."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from isthmus.cli import process_state
from isthmus.cli.exit import ending_of
from isthmus.errors import Preempted
from isthmus.launch.first_failure import STOP_FILE, RankReport, reports_folder
from isthmus.launch.rank_env import end_with_parent, rank
from isthmus.launch.rank_watchdog import watch_peers
from isthmus.train.stop import StopFlag


def run_rank(argv: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Run the command line, report how it ended and return the exit code of the process."""
    folder = reports_folder()
    assert folder is not None
    # Before torch is imported: a signal that comes meanwhile must wait for the training loop, not end this process.
    stop = StopFlag()
    stop.install()
    end_with_parent()
    watch_peers(folder, rank())
    if (folder / STOP_FILE).exists():
        stop.request()
    process_state.argv, process_state.started_by_isthmus = list(argv), True
    ending = ending_of(lambda: run(argv))
    report = RankReport(rank=rank(), exit_code=ending.exit_code, message=ending.message, traceback=ending.traceback)
    report.write(folder)
    if ending.exit_code == 0:
        return 0
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Leave at once: after a failure the interpreter may wait for threads that wait for a peer that is gone. A rank
    # that saved counts as done, or elastic would hurry the others out of their saving.
    os._exit(0 if ending.exit_code == Preempted.exit_code else ending.exit_code)
