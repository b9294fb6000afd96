"""Machines of copies in memory, and the exchange of their files; tests/faults/test_memory_copies.py has whole runs."""

from __future__ import annotations

from pathlib import Path

from ranks.rank_pool import RankPool


def test_ranks_that_see_one_folder_are_on_one_machine(two_ranks: RankPool, tmp_path: Path) -> None:
    task, folder = "ranks.memory_copies_tasks.machines", tmp_path / "memory"
    folder.mkdir()
    assert two_ranks.run(task, folder=folder, separate=False, hosts=False)[0] == [[0, 1]]
    assert two_ranks.run(task, folder=folder, separate=True, hosts=True)[0] == [[0], [1]]
    refused, message = two_ranks.run(task, folder=folder, separate=False, hosts=True)
    assert not refused and f"memory_dir={folder} is one folder for the machines host-0, host-1" in message


def test_exchange_of_files(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run("ranks.memory_copies_tasks.exchanged", folder=tmp_path) == [True, True]
