"""Two machines, played by network namespaces: the same command and numbers as on one, and a word on what fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.command import rows
from faults.fork_server import ForkServer
from faults.hosts import ADDRESSES, DEAD_ADDRESSES, two_hosts


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    try:
        with two_hosts() as names:
            yield names
    except PermissionError as reason:
        pytest.skip(f"no network namespaces: {reason}")


def as_slurm_does(rank: int) -> dict[str, str]:
    """The variables of a task of a step of four on two nodes."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": f"{ADDRESSES[0][:-1]}[1-2]",
        "SLURM_JOB_ID": "4242",
        "SLURM_STEP_ID": "0",
    }


def test_two_hosts_train_what_one_process_trains(
    isthmus: ForkServer, namespaces: tuple[str, str], small: list[str], tmp_path: Path
) -> None:
    """tp inside a host, dp across; by Slurm's variables, with no interface named."""
    words = [*small, "parallel.tp=2", "train.steps=6"]
    ranks = [[(words, as_slurm_does(2 * host + local)) for local in (0, 1)] for host in (0, 1)]
    ended = isthmus.start_ranks(ranks, namespaces).ended()
    assert [one.returncode for one in ended] == [0, 0, 0, 0], ended
    for host, address in enumerate(ADDRESSES):
        assert f"ranks {2 * host}-{2 * host + 1} on " in ended[0].stderr and f"({address})" in ended[0].stderr
    spread = [row for row in rows(tmp_path / "out") if "loss" in row]

    alone = tmp_path / "alone"
    (one,) = isthmus.start_ranks([[([*small, "--out", str(alone), "train.steps=6"], {})]]).ended()
    assert one.returncode == 0, one
    single = [row for row in rows(alone) if "loss" in row]
    assert len(spread) == len(single) == 6
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in spread] == pytest.approx([row[name] for row in single], rel=1e-5)


def test_interface_that_leads_nowhere(isthmus: ForkServer, namespaces: tuple[str, str], small: list[str]) -> None:
    ranks = [[(small, as_slurm_does(2 * host + local)) for local in (0, 1)] for host in (0, 1)]
    for _, variables in ranks[1]:
        variables["GLOO_SOCKET_IFNAME"] = "dead0"
    ended = isthmus.start_ranks(ranks, namespaces).ended()
    assert [one.returncode for one in ended] == [76, 76, 76, 76], ended
    told = [line for one in ended for line in one.errors]
    assert len(told) == 2  # one a host
    for line in told:
        assert "rank 1 " in line and "cannot reach rank 2" in line and DEAD_ADDRESSES[1] in line
        assert "dead0" in line and "GLOO_SOCKET_IFNAME" in line and "wire0" in line
