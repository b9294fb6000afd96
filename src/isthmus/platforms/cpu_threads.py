"""CPU threads of a process: the cores they can use, and how they wait for each other. Imports nothing slow."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables that say how OpenMP threads wait."""
_CGROUP, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def sleep_while_waiting(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP threads sleep when they wait, unless the user has chosen; before torch is imported.

    Otherwise a thread that waits for another one spins, on a core that the other one may need: if more processes
    compute than there are cores, the step takes many times longer.
    """
    if not any(name in environment for name in WAITING):
        environment["OMP_WAIT_POLICY"] = "passive"


def cores() -> int:
    """Cores that this process may use: by its affinity, and by the CPU limit of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *map(math.ceil, _limits(_CGROUP, _OWN_CGROUPS))]))


def _limits(root: Path, own: Path) -> Iterator[float]:
    """CPU limits, in cores, of the control groups that this process is in; empty without any."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            files = [folder / name for name in names]
            values = " ".join(file.read_text() for file in files if file.is_file()).split()
            if len(values) == 2 and values[0] not in ("max", "-1"):
                yield int(values[0]) / int(values[1])
