from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from isthmus.errors import UsageError
from isthmus.launch import machine_folder
from isthmus.launch.first_failure import Failure
from isthmus.launch.machine_folder import Beat, MachineFolder, described, open_machine_folder


def test_first_failure_of_a_machine_stays(tmp_path: Path) -> None:
    """Also when the same rank posts twice."""
    folder = MachineFolder(tmp_path, agent=0, rank=0, is_shared=True)
    first = Failure(exit_code=65, message="bad data.", rank=1, machine=["node0", ""])
    assert folder.post(first) == first
    assert folder.post(Failure(exit_code=76, message="lost.", rank=0, machine=["node0", ""])) == first
    assert folder.failure() == first


@pytest.mark.processes
def test_lock_of_a_rank_ends_with_its_process_and_not_in_a_forked_child(tmp_path: Path) -> None:
    first = MachineFolder(tmp_path, agent=0, rank=0, is_shared=True)
    with pytest.raises(UsageError, match="another process has RANK=0"):
        MachineFolder(tmp_path, agent=0, rank=0, is_shared=True)
    ready, forked = os.pipe()
    ended, end = os.pipe()
    if (child := os.fork()) == 0:
        os.write(forked, b"x")
        os.close(end)
        os.read(ended, 1)  # up to the end of the other process
        os._exit(0)
    try:
        os.read(ready, 1)
        assert first.is_alive(0)
        first._unlock()  # as the kernel does it
        assert not first.is_alive(0)  # although the child lives
    finally:
        os.close(end)
        os.waitpid(child, 0)


def test_last_rank_removes_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    ranks = [MachineFolder(path, agent=0, rank=rank) for rank in range(2)]
    ranks[0].leave()
    assert ranks[1].have_left([0]) and not ranks[1].have_left([1])
    ranks[1].leave()
    assert not path.exists()


def test_ranks_share_the_folder_that_the_first_one_announces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(machine_folder.tempfile, "tempdir", str(tmp_path))
    store, folders = dist.HashStore(), []
    for rank in (3, 1, 2):
        monkeypatch.setenv("RANK", str(rank))
        if rank == 2:  # in a container with other temporary files
            store = dist.HashStore()
            store.set(f"rendezvous/folder/{'/'.join(machine_folder.this_machine())}", json.dumps([3, "/nonexistent"]))
        folders.append(open_machine_folder(store))
    first, second, third = folders
    assert first.path == second.path != third.path and (second.agent, third.agent) == (3, 2)
    assert first.path.stat().st_mode & 0o777 == 0o700 and len(list(tmp_path.iterdir())) == 2
    for folder in folders:
        folder.leave()
    assert not list(tmp_path.iterdir())


def test_ranks_are_described_with_few_ranks_first() -> None:
    machines = [Beat(f"node{index}", 1, {"step 3: optimizer": [2 * index, 2 * index + 1]}) for index in range(6)]
    machines[4] = Beat("node4", 1, {"step 3: optimizer": [8], "": [9]})
    expected = "rank 9 on node4, last in between steps; ranks 0-8, 10-11 on 6 machines, last in step 3: optimizer"
    assert described(machines) == expected
    assert described(machines[:2]) == "ranks 0-1 on node0, ranks 2-3 on node1, last in step 3: optimizer"
