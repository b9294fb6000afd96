"""Free memory, and returning unused memory to the system."""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil

_GROUP = Path("/sys/fs/cgroup")


def free_bytes(group: Path = _GROUP) -> int:
    """Free bytes of the machine, or of the container (cgroup v2) if that has less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Inactive file cache counts as used, and is reclaimed on demand.
        return free if limit == "max" else min(free, int(limit) - int(used) + int(counts["inactive_file"]))
    except (OSError, ValueError, KeyError):
        return free


def trim_memory() -> None:
    """Return freed memory to the system where the C library supports it; glibc keeps the part below memory in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
