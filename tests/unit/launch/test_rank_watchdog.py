from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.launch.first_failure import RankReport
from isthmus.launch.rank_watchdog import lost_peer

pytestmark = pytest.mark.processes


def known(folder: Path, rank: int, pid: int) -> None:
    (folder / f"pid-{rank}").write_text(str(pid))


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_ranks_that_run_finished_or_were_stopped_are_not_lost(tmp_path: Path) -> None:
    for rank in (0, 1):
        known(tmp_path, rank, os.getpid())
    (tmp_path / "pid-9.tmp").touch()  # about to be renamed
    assert lost_peer(tmp_path, 0) is None
    for rank, exit_code in ((2, 0), (3, 75)):
        known(tmp_path, rank, dead_pid())
        RankReport(rank=rank, exit_code=exit_code).write(tmp_path)
    assert lost_peer(tmp_path, 0) is None


def test_rank_that_failed_or_died_unheard_is_lost_to_the_others(tmp_path: Path) -> None:
    known(tmp_path, 0, os.getpid())
    RankReport(rank=0, exit_code=65).write(tmp_path)
    assert lost_peer(tmp_path, 0) is None and lost_peer(tmp_path, 1) == 0
    known(tmp_path, 2, dead_pid())
    assert lost_peer(tmp_path, 0) == 2


def test_zombie_is_dead(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert process.stdout and not process.stdout.read()  # ended, or about to
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    known(tmp_path, 1, process.pid)
    assert lost_peer(tmp_path, 0) == 1
    process.wait()
    process.stdout.close()
