"""Free memory, and release of unused memory to the system."""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil

_GROUP = Path("/sys/fs/cgroup")


def free_bytes(group: Path = _GROUP) -> int:
    """Free memory of the machine, or of the container (cgroup v2) if that is less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Inactive file cache counts as used, and is reclaimed on demand.
        return free if limit == "max" else min(free, int(limit) - int(used) + int(counts["inactive_file"]))
    except (OSError, ValueError, KeyError):
        return free


def trim_memory() -> None:
    """Return freed memory to the system with ``malloc_trim``, where it exists."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
