"""A rank that never starts, dies, hangs or fails is reported by name within the time limit."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from faults.command import CompletedCommand, wait_for_step
from faults.fork_server import ForkServer, RunningRanks
from faults.hosts import rank_variables


def error(completed: list[CompletedCommand], code: int) -> str:
    """Check the exit code of all ranks and return their only error message."""
    assert [item.returncode for item in completed] == [code] * len(completed), completed
    (line,) = [line for item in completed for line in item.errors]
    assert not any("Traceback" in item.stderr for item in completed), completed
    return line


def running(isthmus: ForkServer, args: list[str], out: Path) -> RunningRanks:
    """Start two ranks with ``timeout_s=3`` and wait for step 3."""
    args = [*args, "parallel.tp=2", "train.steps=100000", "parallel.timeout_s=3"]
    ranks = isthmus.start_ranks([[(args, variables) for variables in rank_variables(2)]])
    wait_for_step(out, 3)
    return ranks


def test_missing_rank(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    args = [*sft_args, "parallel.join_timeout_s=2"]
    variables = rank_variables(4)
    line = error(isthmus.start_ranks([[(args, variables[rank]) for rank in (0, 1, 3)]]).wait(), 76)
    assert "3 of 4 ranks" in line and "Missing: rank 2" in line and "ranks 0-1, 3 on " in line
    assert "join_timeout_s" in line and f"127.0.0.1:{variables[0]['MASTER_PORT']}" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_missing_rank_zero(isthmus: ForkServer, sft_args: list[str]) -> None:
    variables = rank_variables(2)
    line = error(isthmus.start_ranks([[([*sft_args, "parallel.join_timeout_s=1"], variables[1])]]).wait(), 76)
    assert "rank 1 on " in line and f"127.0.0.1:{variables[1]['MASTER_PORT']}" in line
    assert "interface lo" in line and "refused" in line and "MASTER_ADDR" in line


def test_wrong_variables_are_refused(isthmus: ForkServer, sft_args: list[str]) -> None:
    def refused(**wrong: str) -> str:
        variables = {name: value for name, value in (rank_variables(2)[0] | wrong).items() if value}
        return error(isthmus.start_ranks([[(sft_args, variables)]]).wait(), 2)

    line = refused(GLOO_SOCKET_IFNAME="nosuch0")
    assert "GLOO_SOCKET_IFNAME=nosuch0" in line and "lo 127.0.0.1" in line
    assert "MASTER_ADDR=''" in refused(MASTER_ADDR="")
    assert "MASTER_PORT='x'" in refused(MASTER_PORT="x")


@pytest.mark.thorough_cases("0", "1")
@pytest.mark.parametrize("victim", [0, 1])
def test_suspended_rank(isthmus: ForkServer, sft_args: list[str], tmp_path: Path, victim: int) -> None:
    """Its connections stay open, as those of a machine that has lost its power; rank 0 serves the store."""
    ranks = running(isthmus, sft_args, tmp_path / "out")
    ranks.send(victim, signal.SIGSTOP)
    other = 1 - victim
    started_s = time.monotonic()
    while ranks.running(other):
        time.sleep(0.05)
    waited_s = time.monotonic() - started_s
    ranks.send(victim, signal.SIGKILL)
    completed = ranks.wait()
    assert (completed[other].returncode, completed[victim].returncode) == (76, -signal.SIGKILL), completed
    (line,) = completed[other].errors
    # The step is random. The other rank must not wait for the 600 s timeout of its collective.
    regions = "step [0-9]+: forward and backward|step [0-9]+: optimizer|between steps"
    lost_rank = f"no heartbeat any more of rank 1 .* last in ({regions})"
    assert re.search(lost_rank if victim else "rank 0 or its launcher has ended, or its machine is down: ", line)
    assert waited_s < 30


def test_second_ctrl_c_ends_a_rank_that_waits(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    """Under another launcher: Python handles no signal while the main thread waits for the lost rank, up to 90 s."""
    args = [*sft_args, "parallel.tp=2", "train.steps=100000"]
    ranks = isthmus.start_ranks([[(args, variables) for variables in rank_variables(2)]])
    wait_for_step(tmp_path / "out", 3)
    ranks.send(1, signal.SIGSTOP)
    time.sleep(0.3)
    for _ in range(2):
        ranks.send(0, signal.SIGINT)
        ranks.send(0, signal.SIGINT)  # like batch systems
        assert ranks.running(0)
        time.sleep(0.6)
    started_s = time.monotonic()
    while ranks.running(0):
        time.sleep(0.05)
    assert time.monotonic() - started_s < 60
    ranks.send(1, signal.SIGKILL)
    completed = ranks.wait()
    assert completed[0].returncode == 130 and "rank 0: killed" in completed[0].errors[0], completed


@pytest.mark.thorough_cases("load-1-last in loading the model", "save-0-rank 0 or its launcher")
@pytest.mark.parametrize(
    ("phase", "rank", "message"), [("save", 0, "rank 0 or its launcher"), ("load", 1, "last in loading the model")]
)
def test_rank_that_is_lost_outside_of_steps(
    isthmus: ForkServer, sft_args: list[str], phase: str, rank: int, message: str
) -> None:
    variables = rank_variables(2)
    variables[rank]["FAULT"] = f"suspend in {phase}"
    ranks = isthmus.start_ranks([[([*sft_args, "parallel.timeout_s=2"], variable) for variable in variables]])
    while ranks.running(1 - rank):
        time.sleep(0.05)
    ranks.send(rank, signal.SIGKILL)
    other = ranks.wait()[1 - rank]
    assert other.returncode == 76 and len(other.errors) == 1 and message in other.errors[0], other


@pytest.mark.thorough_cases("1")
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank(isthmus: ForkServer, sft_args: list[str], tmp_path: Path, victim: int) -> None:
    ranks = running(isthmus, sft_args, tmp_path / "out")
    ranks.send(victim, signal.SIGKILL)
    completed = ranks.wait()
    assert completed[victim].returncode == -signal.SIGKILL
    other = completed[1 - victim]
    assert other.returncode == 76 and len(other.errors) == 1, other
    assert f"rank {victim}" in other.errors[0]


def test_error_of_one_rank_ends_all_ranks(isthmus: ForkServer, sft_args: list[str]) -> None:
    args = [*sft_args, "parallel.tp=2"]
    first, second = rank_variables(2)
    completed = isthmus.start_ranks([[(args, first)], [(args, second | {"FAULT": "fail"})]]).wait()
    assert [item.returncode for item in completed] == [70, 70], completed
    (line,) = [line for item in completed for line in item.errors]
    assert "rank 1: ZeroDivisionError: division by zero" in line


def test_hanging_rank_with_heartbeat(isthmus: ForkServer, sft_args: list[str]) -> None:
    args = [*sft_args, "parallel.tp=2", "parallel.timeout_s=2"]
    first, second = rank_variables(2)
    ranks = isthmus.start_ranks([[(args, first)], [(args, second | {"FAULT": "sleep"})]])
    completed = ranks.wait()
    assert [item.returncode for item in completed] == [76, 76], completed
    (line,) = completed[0].errors
    assert "got no answer" in line and "rank 1 on " in line and "step 3: data" in line and "timeout_s=2" in line
