"""Limits of the control groups that a process is in: of a container, or of a job of a batch system.

``root`` is the parent of ``/proc`` and ``/sys``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT = 1 << 60
"""Version 1 has a number near 2**63 where there is no limit."""


def cpu_limits(root: Path = Path("/")) -> Iterator[float]:
    """CPU limits in cores; empty without any."""
    for folder, version in _folders("cpu", root):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
        values = " ".join(_text(folder / name) for name in names).split()
        if len(values) == 2 and values[0] not in ("max", "-1"):
            yield int(values[0]) / int(values[1])


def memory_limits(root: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """Memory limits in bytes, and how many processes each has killed; empty without any."""
    for folder, version in _folders("memory", root):
        value = _text(folder / ("memory.limit_in_bytes" if version == 1 else "memory.max"))
        if value.isdigit() and int(value) < _NO_LIMIT:
            events = _text(folder / ("memory.oom_control" if version == 1 else "memory.events"))
            kills = re.search(r"^oom_kill (\d+)$", events, re.MULTILINE)
            yield int(value), int(kills[1]) if kills else 0


def _folders(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Folder and version of each group that limits this process, the innermost first."""
    memberships, groups = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    for line in memberships.read_text().splitlines() if memberships.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = groups / controller if controllers else groups
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            yield folder, 1 if controllers else 2


def _text(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""
