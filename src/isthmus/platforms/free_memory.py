"""How much memory a process may still take, and giving back what it does not use."""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil

_GROUP = Path("/sys/fs/cgroup")


def free_bytes(group: Path = _GROUP) -> int:
    """What the machine has left, or what a container's share has (control groups, version 2) where that is less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Files that were read and not since count as used, and are given up when memory is wanted.
        return free if limit == "max" else min(free, int(limit) - int(used) + int(counts["inactive_file"]))
    except (OSError, ValueError, KeyError):
        return free


def give_back() -> None:
    """Return freed memory to the system, where the C library can: glibc keeps what lies below anything still in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
