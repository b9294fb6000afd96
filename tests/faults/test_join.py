"""Ranks that miss each other: one that never comes, dies, hangs or fails is named, within the time limit."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from faults.command import Ended, rows
from faults.fork_server import ForkServer, Started
from faults.hosts import world


def error(ended: list[Ended], code: int) -> str:
    """The one line that all ranks together tell, each of them ending with ``code``."""
    assert [one.returncode for one in ended] == [code] * len(ended), ended
    (line,) = [line for one in ended for line in one.errors]
    assert not any("Traceback" in one.stderr for one in ended), ended
    return line


def wait_for_step(out: Path, step: int) -> None:
    while not (out / "metrics.jsonl").exists() or all(row.get("step", 0) < step for row in rows(out)):
        time.sleep(0.05)


def running(isthmus: ForkServer, words: list[str], out: Path) -> Started:
    """Two ranks in the middle of a run, with a time limit of 3 s."""
    words = [*words, "parallel.tp=2", "train.steps=100000", "parallel.timeout_s=3"]
    ranks = isthmus.start_ranks([[(words, variables) for variables in world(2)]])
    wait_for_step(out, 3)
    return ranks


def test_rank_that_never_comes(isthmus: ForkServer, small: list[str], tmp_path: Path) -> None:
    words = [*small, "parallel.join_timeout_s=2"]
    variables = world(4)
    line = error(isthmus.start_ranks([[(words, variables[rank]) for rank in (0, 1, 3)]]).ended(), 76)
    assert "3 of 4 ranks" in line and "Missing: rank 2" in line and "ranks 0-1, 3 on " in line
    assert "join_timeout_s" in line and f"127.0.0.1:{variables[0]['MASTER_PORT']}" in line
    assert not (tmp_path / "out").exists()


def test_first_rank_never_comes(isthmus: ForkServer, small: list[str]) -> None:
    variables = world(2)
    line = error(isthmus.start_ranks([[([*small, "parallel.join_timeout_s=1"], variables[1])]]).ended(), 76)
    assert "rank 1 on " in line and f"127.0.0.1:{variables[1]['MASTER_PORT']}" in line
    assert "interface lo" in line and "refused" in line and "MASTER_ADDR" in line


def test_wrong_variables_are_refused(isthmus: ForkServer, small: list[str]) -> None:
    def refused(**wrong: str) -> str:
        variables = {name: value for name, value in (world(2)[0] | wrong).items() if value}
        return error(isthmus.start_ranks([[(small, variables)]]).ended(), 2)

    line = refused(GLOO_SOCKET_IFNAME="nosuch0")
    assert "GLOO_SOCKET_IFNAME=nosuch0" in line and "lo 127.0.0.1" in line
    assert "MASTER_ADDR=''" in refused(MASTER_ADDR="")
    assert "MASTER_PORT='x'" in refused(MASTER_PORT="x")


def test_rank_that_is_stopped(isthmus: ForkServer, small: list[str], tmp_path: Path) -> None:
    ranks = running(isthmus, small, tmp_path / "out")
    ranks.send(1, signal.SIGSTOP)
    started_s = time.monotonic()
    while Path("/proc", str(ranks.pids[0]), "wchan").exists() and "Z" not in _state(ranks.pids[0]):
        time.sleep(0.05)
    waited_s = time.monotonic() - started_s
    ranks.send(1, signal.SIGKILL)
    first, second = ranks.ended()
    assert (first.returncode, second.returncode) == (76, -signal.SIGKILL), first
    (line,) = first.errors
    # Where a signal meets it is chance; that the other does not wait for its collective's 600 s is not.
    places = "step [0-9]+: forward and backward|step [0-9]+: optimizer|between steps"
    assert re.search(f"no heartbeat any more of rank 1 .* last in ({places})", line)
    assert waited_s < 100


def _state(pid: int) -> str:
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("victim", [0, 1])
def test_rank_that_is_killed(isthmus: ForkServer, small: list[str], tmp_path: Path, victim: int) -> None:
    ranks = running(isthmus, small, tmp_path / "out")
    ranks.send(victim, signal.SIGKILL)
    ended = ranks.ended()
    assert ended[victim].returncode == -signal.SIGKILL
    other = ended[1 - victim]
    assert other.returncode == 76 and len(other.errors) == 1, other
    assert f"rank {victim}" in other.errors[0]


def test_what_one_rank_has_failed_with_reaches_all(isthmus: ForkServer, small: list[str]) -> None:
    words = [*small, "parallel.tp=2"]
    first, second = world(2)
    ended = isthmus.start_ranks([[(words, first)], [(words, second | {"FAULT": "fail"})]]).ended()
    assert [one.returncode for one in ended] == [70, 70], ended
    (line,) = [line for one in ended for line in one.errors]
    assert "rank 1: ZeroDivisionError: division by zero" in line


def test_rank_that_hangs_but_lives(isthmus: ForkServer, small: list[str]) -> None:
    words = [*small, "parallel.tp=2", "parallel.timeout_s=2"]
    first, second = world(2)
    ranks = isthmus.start_ranks([[(words, first)], [(words, second | {"FAULT": "sleep"})]])
    ended = ranks.ended()
    assert [one.returncode for one in ended] == [76, 76], ended
    (line,) = ended[0].errors
    assert "got no answer" in line and "rank 1 on " in line and "step 3: data" in line and "timeout_s=2" in line
