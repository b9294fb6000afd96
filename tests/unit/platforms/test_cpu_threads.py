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
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert cores(tmp_path) == expected


@pytest.mark.parametrize(("running", "environment"), [(1, {}), (2, {"OMP_WAIT_POLICY": "passive"})])
def test_threads_sleep_only_on_shared_cores(
    running: int, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loadavg").write_text(f"9.00 9.00 9.00 {running}/79 20521\n")
    monkeypatch.setattr(cpu_threads, "_LOAD", tmp_path / "loadavg")
    monkeypatch.setattr(cpu_threads, "cores", os.cpu_count)
    variables: dict[str, str] = {}
    sleep_while_waiting(variables)
    assert variables == environment


def test_the_user_and_the_launcher_choose_how_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "cores_in_use", lambda: 1)
    for name in (*WAITING, "SLURM_PROCID"):
        chosen = {name: ""}
        sleep_while_waiting(chosen)
        assert chosen == {name: ""}
    rank = {"WORLD_SIZE": "2"}
    sleep_while_waiting(rank)
    assert rank == {"WORLD_SIZE": "2"}
