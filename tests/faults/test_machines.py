"""Two to four machines, simulated with network namespaces: losses as on one machine, and errors of the network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.command import rows, wait_for_step
from faults.fork_server import ForkServer, RunningRanks
from faults.hosts import (
    ADDRESSES,
    DEAD_ADDRESSES,
    cut_wire,
    rank_variables,
    simulated_hosts,
    slow_link,
    swallowed,
    two_hosts,
)

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    try:
        with two_hosts() as names:
            yield names
    except PermissionError as reason:
        pytest.skip(f"no network namespaces: {reason}")


@pytest.fixture(scope="module")
def four_hosts() -> Iterator[list[str]]:
    try:
        with simulated_hosts(4) as names:
            yield names
    except PermissionError as reason:
        pytest.skip(f"no network namespaces: {reason}")


def start(isthmus: ForkServer, args: list[str], hosts: list[str]) -> RunningRanks:
    """Start one rank on each host."""
    args = [*args, "parallel.tp=2", "train.steps=100000", "parallel.timeout_s=4"]
    variables = rank_variables(len(hosts), address=ADDRESSES[0])
    return isthmus.start_ranks([[(args, variable | {"LOCAL_RANK": "0"})] for variable in variables], tuple(hosts))


def slurm_variables(rank: int) -> dict[str, str]:
    """The environment variables of one of four tasks on two nodes."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": f"{ADDRESSES[0][:-1]}[1-2]",
        "SLURM_JOB_ID": "4242",
        "SLURM_STEP_ID": "0",
    }


def test_two_hosts_train_as_single_process(
    isthmus: ForkServer, namespaces: tuple[str, str], sft_args: list[str], tmp_path: Path
) -> None:
    """Tensor parallel within a host, data parallel across; Slurm variables, no interface configured."""
    args = [*sft_args, "parallel.tp=2", "train.steps=6"]
    ranks = [[(args, slurm_variables(2 * host + local)) for local in (0, 1)] for host in (0, 1)]
    completed = isthmus.start_ranks(ranks, namespaces).wait()
    assert [item.returncode for item in completed] == [0, 0, 0, 0], completed
    for host, address in enumerate(ADDRESSES[:2]):
        assert f"ranks {2 * host}-{2 * host + 1} on " in completed[0].stderr and f"({address})" in completed[0].stderr
    two_hosts_rows = [row for row in rows(tmp_path / "out") if "loss" in row]

    alone = tmp_path / "alone"
    (item,) = isthmus.start_ranks([[([*sft_args, "--out", str(alone), "train.steps=6"], {})]]).wait()
    assert item.returncode == 0, item
    one_host_rows = [row for row in rows(alone) if "loss" in row]
    assert len(two_hosts_rows) == len(one_host_rows) == 6
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in two_hosts_rows] == pytest.approx([row[name] for row in one_host_rows], rel=1e-5)


def test_interface_without_route(isthmus: ForkServer, namespaces: tuple[str, str], sft_args: list[str]) -> None:
    ranks = [[(sft_args, slurm_variables(2 * host + local)) for local in (0, 1)] for host in (0, 1)]
    for _, variables in ranks[1]:
        variables["GLOO_SOCKET_IFNAME"] = "dead0"
    completed = isthmus.start_ranks(ranks, namespaces).wait()
    assert [item.returncode for item in completed] == [76, 76, 76, 76], completed
    messages = [line for item in completed for line in item.errors]
    assert len(messages) == 2  # one per host
    for line in messages:
        assert "rank 1 " in line and "cannot reach rank 2" in line and DEAD_ADDRESSES[1] in line
        assert "dead0" in line and "GLOO_SOCKET_IFNAME" in line and "wire0" in line


def test_machine_that_loses_its_network(
    isthmus: ForkServer, namespaces: tuple[str, str], sft_args: list[str], tmp_path: Path
) -> None:
    """No packet tells the other machine, as when the power fails."""
    args = [*sft_args, "parallel.tp=2", "train.steps=100000", "parallel.timeout_s=3"]
    variables = rank_variables(2, address=ADDRESSES[0])
    ranks = isthmus.start_ranks([[(args, variables[0])], [(args, variables[1] | {"LOCAL_RANK": "0"})]], namespaces)
    wait_for_step(tmp_path / "out", 3)
    with cut_wire(namespaces[1]):
        first, second = ranks.wait()
    assert (first.returncode, second.returncode) == (76, 76), (first, second)
    assert "no heartbeat any more of rank 1" in first.errors[0], first
    assert "rank 0 or its launcher has ended, or its machine is down: 10.213.0.1:" in second.errors[0], second


def test_dropped_link_of_one_of_four_machines(
    isthmus: ForkServer, four_hosts: list[str], sft_args: list[str], tmp_path: Path
) -> None:
    """All other machines name its rank; it names rank 0, which it does not reach any more."""
    ranks = start(isthmus, sft_args, four_hosts)
    wait_for_step(tmp_path / "out", 3)
    with cut_wire(four_hosts[2]):
        completed = ranks.wait()
    assert [item.returncode for item in completed] == [76] * 4, completed
    for rank in (0, 1, 3):
        (line,) = completed[rank].errors
        assert "no heartbeat any more of rank 2 on " in line, completed
    assert f"its machine is down: {ADDRESSES[0]}:" in completed[2].errors[0], completed


def test_half_open_connections(isthmus: ForkServer, four_hosts: list[str], sft_args: list[str], tmp_path: Path) -> None:
    """What one machine sends is lost, although its link is up and its connections are open."""
    ranks = start(isthmus, sft_args, four_hosts)
    wait_for_step(tmp_path / "out", 3)
    with swallowed(four_hosts[3], *ADDRESSES[:3]):
        completed = ranks.wait()
    assert [item.returncode for item in completed] == [76] * 4, completed
    for rank in range(3):
        (line,) = completed[rank].errors
        assert "no heartbeat any more of rank 3 on " in line, completed
    assert f"its machine is down: {ADDRESSES[0]}:" in completed[3].errors[0], completed


def test_run_continues_over_a_slow_link(
    isthmus: ForkServer, four_hosts: list[str], sft_args: list[str], tmp_path: Path
) -> None:
    """A machine whose every request to the store takes 0.4 s more is not lost."""
    hosts = four_hosts[:2]
    args = [*sft_args, "train.steps=6", "parallel.timeout_s=30"]
    first, second = rank_variables(2, address=ADDRESSES[0])
    second |= {"LOCAL_RANK": "0", "MASTER_ADDR": ADDRESSES[1]}
    with slow_link(hosts[1], second["MASTER_PORT"], ADDRESSES[0], 0.2):
        completed = isthmus.start_ranks([[(args, first)], [(args, second)]], tuple(hosts)).wait()
    assert [item.returncode for item in completed] == [0, 0], completed
    assert len([row for row in rows(tmp_path / "out") if "loss" in row]) == 6
