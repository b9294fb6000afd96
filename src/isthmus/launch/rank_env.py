"""The world this process was started into: alone, as one of our ranks, under torchrun, or as a task of Slurm."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import MutableMapping

from isthmus.errors import UsageError

# torchrun's, MASTER_ADDR and MASTER_PORT apart, which Slurm has no words for.
_FROM_SLURM = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
}


def join_world(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether this process is one rank of several; a Slurm task is given the variables that torchrun would set.

    Args:
        environment: read, and completed for a Slurm task.

    Raises:
        UsageError: the variables of a rank are there but cannot be.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _number(environment, "WORLD_SIZE") > 1
    # A batch script has SLURM_NTASKS and SLURM_PROCID=0 too; only srun's tasks have a step with a number of tasks.
    if "SLURM_PROCID" not in environment or _number(environment, "SLURM_STEP_NUM_TASKS", 1) < 2:
        return False
    for name, source in _FROM_SLURM.items():
        environment[name] = str(_number(environment, source, 0))
    environment.setdefault("LOCAL_WORLD_SIZE", _first(environment.get("SLURM_STEP_TASKS_PER_NODE", "1")))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "localhost"
    environment.setdefault("MASTER_ADDR", first_node(nodes))
    # The same on all tasks, and apart for jobs that share a node.
    job = _number(environment, "SLURM_JOB_ID", 0) * 7 + _number(environment, "SLURM_STEP_ID", 0)
    environment.setdefault("MASTER_PORT", str(20000 + job % 10000))
    return True


def rank() -> int:
    """This process's rank; 0 when it is alone."""
    return _number(os.environ, "RANK", 0)


def speaks_last() -> bool:
    """Whether this is the last rank of all, on another machine than the first."""
    last = _number(os.environ, "WORLD_SIZE", 1) - 1
    return rank() == last and last >= ranks_here()


def ranks_here() -> int:
    """Ranks on this machine."""
    return _number(os.environ, "LOCAL_WORLD_SIZE", 1)


def end_with_parent() -> None:
    """Have the kernel send SIGTERM here when the process that started this rank dies, so that no rank runs on alone."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_death_signal, int(signal.SIGTERM))


def first_node(nodes: str) -> str:
    """The first host of a Slurm node list: ``gpu[07-09,12],cpu1`` -> ``gpu07``; ``rack[1-2]n[4,6]`` -> ``rack1n4``."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match.group()) if match else nodes


def _first(tasks_per_node: str) -> str:
    """``4(x2),1`` -> ``4``."""
    match = re.match(r"\d+", tasks_per_node)
    return match.group() if match else "1"


def _number(environment: MutableMapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not text.isdigit():
        raise UsageError(f"the environment has {name}={text!r}, wanted a number. Unset it, or start with torchrun.")
    return int(text)
