from __future__ import annotations

import os
from pathlib import Path

import pytest

from isthmus.platforms import cpu_threads
from isthmus.platforms.cpu_threads import WAITING, cores, sleep_while_waiting


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000"}, 2),
        ("0::/\n", {"cpu.max": "max 100000"}, 64),
        ("0::/slurm/job\n", {"slurm/job/cpu.max": "max 100000", "slurm/cpu.max": "800000 100000"}, 8),
        ("3:cpu,cpuacct:/a\n1:memory:/a\n", {"cpu/a/cpu.cfs_quota_us": "40000", "cpu/a/cpu.cfs_period_us": "10000"}, 4),
        ("3:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 64),
        ("0::/\n", {"cpu.max": "10000 100000"}, 1),
        ("", {}, 64),
    ],
)  # fmt: skip
def test_cores_of_a_container(
    groups: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (tmp_path / "own").write_text(groups)
    monkeypatch.setattr(cpu_threads, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(cpu_threads, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert cores() == expected


def test_the_user_chooses_how_threads_wait() -> None:
    environment: dict[str, str] = {}
    sleep_while_waiting(environment)
    assert environment == {"OMP_WAIT_POLICY": "passive"}
    for name in WAITING:
        chosen = {name: ""}
        sleep_while_waiting(chosen)
        assert chosen == {name: ""}
