"""The environment of a rank; no other module reads RANK, WORLD_SIZE, MASTER_ADDR and the variables of Slurm."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from isthmus.errors import UsageError

STOP_FILE = "ISTHMUS_STOP_FILE"
"""``--nproc`` sets it to a path; the run stops when this file exists."""
STORE_FILE = "ISTHMUS_STORE_FILE"
"""``--nproc`` sets it to the file of the rendezvous store, in a folder of which only this user may read the files."""
RUN_TOKEN = "ISTHMUS_RUN_TOKEN"
"""A secret of the user, the same on all ranks of a run."""
_SHORTEST_TOKEN = 16
_FROM_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}


def is_one_of_several_ranks(environment: MutableMapping[str, str] = os.environ) -> bool:
    """In a Slurm task, also sets the variables that torchrun would set."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _number(environment, "WORLD_SIZE") > 1
    # A batch script also has SLURM_NTASKS and SLURM_PROCID=0; only tasks of srun have a step with several tasks.
    if "SLURM_PROCID" not in environment or _number(environment, "SLURM_STEP_NUM_TASKS", 1) < 2:
        return False
    for name, source in _FROM_SLURM.items():
        environment[name] = str(_number(environment, source, 0))
    environment.setdefault("LOCAL_WORLD_SIZE", str(slurm_tasks_here(environment)))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "localhost"
    environment.setdefault("MASTER_ADDR", first_node(nodes))
    # All tasks need the same port; jobs that share a node need different ports.
    job = _number(environment, "SLURM_JOB_ID", 0) * 7 + _number(environment, "SLURM_STEP_ID", 0)
    environment.setdefault("MASTER_PORT", str(20000 + job % 10000))
    return True


def slurm_tasks_here(environment: Mapping[str, str]) -> int:
    """Tasks of this step of Slurm on this machine, each with its own cores; 1 outside of a step."""
    tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))  # such as 4(x2),1
    return int(tasks[0]) if tasks else 1


def rank() -> int:
    return _number(os.environ, "RANK", 0)


def world_size() -> int:
    return _number(os.environ, "WORLD_SIZE", 1)


def use_ranks(count: int) -> None:
    """Reduce the run to its first ranks, of which this process is one."""
    here = min(local_world_size(), count - (rank() - local_rank()))
    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(here)}


def local_rank() -> int:
    return _number(os.environ, "LOCAL_RANK", 0)


def local_world_size() -> int:
    return _number(os.environ, "LOCAL_WORLD_SIZE", 1)


def is_last_of_several_machines() -> bool:
    """Whether this is the last rank and not on the machine of rank 0."""
    return rank() == world_size() - 1 >= local_world_size()


def master(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Address and port of the rendezvous store.

    Raises:
        UsageError: the address is missing or the port is invalid.
    """
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if not address or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(
            f"the environment has RANK and WORLD_SIZE, but MASTER_ADDR={address!r} and MASTER_PORT={port!r}. Set them "
            "to the machine of rank 0 and a free port on it, the same on every rank, or start with torchrun."
        )
    return address, int(port)


def run_token() -> str | None:
    """The secret that the ranks share; None if none is set."""
    token = os.environ.get(RUN_TOKEN)
    if token and len(token) < _SHORTEST_TOKEN:
        raise UsageError(
            f"{RUN_TOKEN} has {len(token)} characters, expected {_SHORTEST_TOKEN} or more. Make one for each run: "
            "openssl rand -hex 16."
        )
    return token or None


def hosts_store() -> bool:
    """Whether this process hosts the rendezvous store: rank 0, unless the torch elastic agent does."""
    return rank() == 0 and _has_own_store()


def _has_own_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def attempt() -> int:
    """How often torch elastic has restarted the ranks, if they all use the store of an agent.

    Else each start has a store of its own, and an agent that joined later has counted fewer restarts than others.
    """
    return 0 if _has_own_store() else _number(os.environ, "TORCHELASTIC_RESTART_COUNT", 0)


def error_file() -> Path | None:
    """The file in which torch elastic expects the error of this rank; None under another launcher."""
    return _path("TORCHELASTIC_ERROR_FILE")


def stop_file() -> Path | None:
    """None in a process that ``--nproc`` did not start."""
    return _path(STOP_FILE)


def store_file() -> Path | None:
    """None in a process that ``--nproc`` did not start."""
    return _path(STORE_FILE)


def _path(variable: str) -> Path | None:
    return Path(path) if (path := os.environ.get(variable)) else None


def first_node(nodes: str) -> str:
    """The first host of a Slurm node list: ``gpu[07-09,12],cpu1`` -> ``gpu07``; ``rack[1-2]n[4,6]`` -> ``rack1n4``."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match.group()) if match else nodes


def _number(environment: MutableMapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name) or ("" if default is None else str(default))
    if not text.isdigit():
        raise UsageError(f"the environment has {name}={text!r}, expected a number. Unset it, or start with torchrun.")
    return int(text)
