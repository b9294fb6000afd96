from __future__ import annotations

import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

from free_port import free_port
from isthmus.errors import Hang, Preempted, UsageError
from isthmus.launch import heartbeat, rendezvous
from isthmus.launch.machine_folder import MachineFolder, open_machine_folder, rank_ranges
from isthmus.launch.rendezvous import Member, by_machine
from isthmus.platforms.cpu import CpuPlatform


@pytest.fixture(autouse=True)
def no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat.Heartbeat, "first", None)  # the process would report it as the cause of later errors


@pytest.mark.slow
def test_ranks_that_torchrun_restarts_register_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent keeps its store, with the keys and the failure of the attempt before."""
    monkeypatch.setattr(heartbeat, "_PERIOD_S", 0.05)
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port)}
    for name, value in (variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)

    def register(attempt: int) -> list[int]:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        with heartbeat.Heartbeat(5.0, folder := open_machine_folder(stores[attempt])):
            me = Member(listeners=[], agent=folder.agent)
            machine, _ = rendezvous._register(stores[attempt], folder, me, time.monotonic() + 5.0, 5.0)
        return machine.ranks

    stores = []
    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        stores.append(rendezvous._join_store(5.0))
    assert register(0) == [0]
    with pytest.raises(UsageError, match="another process has RANK=0"):
        register(0)
    assert register(1) == [0]


def test_a_stop_request_does_not_wait_for_missing_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    port = free_port()
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    started_s = time.monotonic()
    store, folder = rendezvous._join_store(5.0), MachineFolder(tmp_path, agent=0)
    with pytest.raises(Preempted, match="stopped before training began"):
        me = Member(listeners=[], agent=0)
        rendezvous._register(store, folder, me, started_s + 60.0, 60.0, lambda: True)
    assert time.monotonic() - started_s < 30.0


@pytest.mark.parametrize("stopped", [True, False])
def test_a_stopped_rank_has_not_lost_rank_0(monkeypatch: pytest.MonkeyPatch, stopped: bool) -> None:
    """A stop request reaches all ranks; the store of rank 0 closes when that one stops first."""

    def closed(_: float) -> NoReturn:
        raise Hang("cannot reach rank 0")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(rendezvous, "_join_store", closed)
    with pytest.raises(Preempted if stopped else Hang):
        with rendezvous.join_ranks(CpuPlatform("test"), join_timeout_s=1.0, timeout_s=1.0, stopped=lambda: stopped):
            pass


def test_consecutive_ranks_are_named_as_a_range() -> None:
    assert rank_ranges([3]) == "rank 3"
    assert rank_ranges([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
    assert rank_ranges([9, 10, 11]) == "ranks 9-11"


def test_ranks_are_listed_by_machine() -> None:
    members = [
        Member(rank=rank, world_size=4, machine=[f"node{rank // 2}", f"10.0.0.{rank // 2}"], listeners=[], agent=0)
        for rank in range(4)
    ]
    assert by_machine(members) == "ranks 0-1 on node0 (10.0.0.0), ranks 2-3 on node1 (10.0.0.1)"


def test_ranks_with_the_same_gpu_are_refused() -> None:
    def members(*devices: str) -> list[Member]:
        place = {"world_size": 3, "machine": ["node0", "10.0.0.1"], "listeners": [], "agent": 0}
        return [Member(rank=rank, device=device, **place) for rank, device in enumerate(devices)]

    rendezvous._check_devices(members("", "", ""))  # CPUs
    rendezvous._check_devices(members("uuid-0", "uuid-1", "uuid-2"))
    with pytest.raises(UsageError, match=r"ranks 0, 2 on node0 use the same GPU \(uuid-0\).*--gpus-per-task=1"):
        rendezvous._check_devices(members("uuid-0, PCI 1", "uuid-1, PCI 2", "uuid-0, PCI 1"))
