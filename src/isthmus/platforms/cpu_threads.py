"""CPU threads of a process: the cores they can use, and how they wait for each other. Imports nothing slow."""

from __future__ import annotations

import math
import os
import time
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from isthmus.platforms.control_groups import cpu_limits

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables that say how OpenMP threads wait."""
_LOAD = Path("/proc/loadavg")


def sleep_while_waiting(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP threads sleep when they wait, if other processes use the cores; before torch is imported.

    A thread that spins uses a core that the thread it waits for may need: a step then takes many times longer. On free
    cores spinning is faster. The user's choice counts, and one of several ranks leaves it to the launcher.
    """
    is_rank = environment.get("WORLD_SIZE", "1") != "1" or "SLURM_PROCID" in environment
    if not is_rank and not any(name in environment for name in WAITING) and cores_in_use():
        environment["OMP_WAIT_POLICY"] = "passive"


def cores_in_use() -> int:
    """Cores of this process that other processes compute on, at least; the median of samples over 50 ms."""
    samples = []
    for _ in range(5):
        time.sleep(0.01)
        with suppress(OSError, ValueError, IndexError):
            running = int(_LOAD.read_text().split()[3].partition("/")[0])  # this process included
            samples.append(running - 1)
    others = sorted(samples)[len(samples) // 2] if samples else 0
    return min(cores(), max(0, others - ((os.cpu_count() or 1) - cores())))


def cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: by its affinity, and by the CPU limit of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *map(math.ceil, cpu_limits(root))]))
