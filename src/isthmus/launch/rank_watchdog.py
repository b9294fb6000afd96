"""What a rank does about its peers: it leaves when one of them is gone, instead of waiting for it in a collective.

A signal cannot do that, since a rank that is blocked in C++ never comes to handle it, and the launcher would wait half
a minute before it kills. A thread of its own can.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import psutil

from isthmus.errors import Hang
from isthmus.launch.first_failure import PREEMPTED, read_reports

GRACE_S = 3.0
"""For this rank's own error to be reported, where it has one of its own; the first failure is told to the user."""
_POLL_S = 0.25


def watch_peers(folder: Path, rank: int) -> None:
    """Make this rank known in ``folder``, and end its process soon after a peer failed or died."""
    path = folder / f"pid-{rank}"
    staged = path.with_suffix(".tmp")
    try:
        staged.write_text(str(os.getpid()))
        staged.replace(path)
    except FileNotFoundError:
        return  # the process that started the ranks is gone, and its folder with it
    threading.Thread(target=_watch, args=(folder, rank), name="watch-peers", daemon=True).start()


def _watch(folder: Path, rank: int) -> None:
    while lost_peer(folder, rank) is None:
        time.sleep(_POLL_S)
    time.sleep(GRACE_S)
    os._exit(Hang.exit_code)


def lost_peer(folder: Path, rank: int) -> int | None:
    """A rank other than ``rank`` that failed, or ended without a word; None while there is none."""
    # Taken before the reports: a rank that ends in between has left its report by then.
    gone = {number for number, pid in _pids(folder).items() if not _runs(pid)}
    ends = {report.rank: report.exit_code for report in read_reports(folder)}
    failed = {number for number, exit_code in ends.items() if exit_code not in (0, PREEMPTED)}
    return min((failed | (gone - ends.keys())) - {rank}, default=None)


def _pids(folder: Path) -> dict[int, int]:
    return {int(path.name.removeprefix("pid-")): int(path.read_text()) for path in folder.glob("pid-*[0-9]")}


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
