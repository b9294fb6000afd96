"""A run on many machines, which each engine renders for its scheduler."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isthmus.config.schema import RunConfig
from isthmus.config.schema.launch import LaunchConfig
from isthmus.errors import IOFailure, MissingInput, UsageError
from isthmus.platforms.base import Platform, RunShape

EngineName = Literal["slurm", "kubernetes", "ray", "ssh"]
_ONLY: Mapping[str, tuple[EngineName, ...]] = {
    "image": ("slurm", "kubernetes"),
    "volumes": ("slurm", "kubernetes"),
    "secret": ("kubernetes",),
    "queue": ("slurm", "kubernetes"),
    "options": ("slurm", "ssh"),
    "hosts": ("ssh",),
    "port": ("kubernetes", "ray", "ssh"),
    "manifest": ("kubernetes",),
}
"""Settings that only some engines have."""
_LOCAL = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))
"""Folders that each machine has for itself."""
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Each round of torchrun has a store of its own; else ranks of an agent that joins later miss it (torch 2.13)."""
SAVE_MARGIN_S = 60
"""Slurm sends the signal up to a minute early or late; elsewhere the time to end after the state is saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run on ``launch.nodes`` machines."""

    config: RunConfig
    command: tuple[str, ...]
    """The words after ``isthmus``, the same on all ranks."""
    ranks_per_node: int
    platform: Platform
    """Platform of the machines; its hardware is not queried."""

    @property
    def machines(self) -> LaunchConfig:
        return self.config.launch

    @property
    def name(self) -> str:
        if self.machines.name is not None:
            return self.machines.name
        words = re.sub(r"[^a-z0-9]+", "-", f"isthmus-{Path(self.config.out).name}".lower())
        return words[:40].strip("-")

    @property
    def nodes(self) -> int:
        """Machines to request, with the spares."""
        return self.machines.nodes + self.machines.spares

    @property
    def python(self) -> str:
        return self.machines.python or ("python" if self.machines.image else sys.executable)

    @property
    def workdir(self) -> str:
        return self.machines.workdir or next(iter(self.machines.volumes.values()), os.getcwd())

    @property
    def environment(self) -> dict[str, tuple[str, str]]:
        """Value and reason of each variable of the ranks. A run sets those of the platform too, unless they are set."""
        config = self.config
        shape = RunShape(
            nodes=self.machines.nodes,
            fsdp=bool(config.parallel.fsdp),
            tp_or_cp=config.parallel.tp > 1 or config.parallel.cp > 1,
            async_tp=config.parallel.async_tp,
            deterministic=config.train.deterministic,
        )
        joining = {_OWN_STORE: ("1", "with launch.spares: a machine may join later")} if self.machines.spares else {}
        user = {name: (value, "launch.env") for name, value in self.machines.env.items()}
        return {**self.platform.env_defaults, **self.platform.env_of_run(shape), **joining, **user}

    @property
    def stop_s(self) -> int:
        """Seconds from the stop signal until the scheduler may kill the ranks."""
        return math.ceil(self.config.checkpoint.grace_s) + SAVE_MARGIN_S


def check_job(job: Job, engine: EngineName) -> None:
    """Refuse settings that the engine does not have, and working and run folders that the machines do not share."""
    machines = job.machines
    for name, engines in _ONLY.items():
        default = LaunchConfig.model_fields[name].get_default(call_default_factory=True)
        if engine not in engines and getattr(machines, name) != default:
            raise UsageError(f"launch.{name} is for {' and '.join(engines)}, got {engine}. Leave it out.")
    if machines.volumes and not machines.image:
        raise UsageError("launch.volumes are mounted in a container, and launch.image is not set. Set it.")
    out = Path(job.workdir, job.config.out)
    if machines.volumes:
        if not any(out.is_relative_to(path) for path in machines.volumes.values()):
            raise UsageError(
                f"out={out} is in no volume of the container ({', '.join(machines.volumes.values())}), so it is lost "
                "with it. Choose --out in one of launch.volumes."
            )
    elif job.nodes > 1:
        _check_shared(job, out)


def _check_shared(job: Job, out: Path) -> None:
    local = f"is on another disk on each of the {job.nodes} machines"
    if _is_local(Path(job.workdir)):
        raise UsageError(
            f"the working folder {job.workdir} {local}, and their ranks start in it and look there for the files of "
            "the command. Run the command in a folder on a file system that they share, or set launch.workdir to one."
        )
    if _is_local(out):
        raise UsageError(
            f"out={out} {local}, and their ranks write one run folder. Choose --out on a file system that they share."
        )


def _is_local(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in _LOCAL)


def check_secrets(job: Job) -> None:
    """Refuse secrets that this shell does not have; slurm and ssh pass their values on."""
    if missing := [name for name in job.machines.secrets if not os.environ.get(name)]:
        raise UsageError(f"launch.secrets names {missing[0]}, which this shell has not set. Export it first.")


def torchrun_words(job: Job, host: str, *, local_address: str | None = None) -> tuple[str, ...]:
    """The command of one machine, which has ``local_address``; ``host`` is the first one, which hosts the rendezvous.

    With spares, torchrun trains on a varying number of machines, and each number must fit the layout, unless the run is
    elastic and uses the ranks that fit.
    """
    fewest, most = job.machines.nodes, job.nodes
    for nodes in () if job.config.parallel.elastic else range(fewest, most + 1):
        job.config.parallel.check_world_size(nodes * job.ranks_per_node)
    is_host = str(local_address == host).lower()  # torchrun compares names otherwise
    local = [] if local_address is None else [f"--local-addr={local_address}", f"--rdzv-conf=is_host={is_host}"]
    return (
        job.python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={fewest}" if fewest == most else f"--nnodes={fewest}:{most}",
        f"--nproc-per-node={job.ranks_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={host}:{job.machines.port}",
        f"--rdzv-id={job.name}",
        *local,
        f"--max-restarts={job.machines.spares}",
        "-m",
        "isthmus",
        *job.command,
    )


def torchrun_environment(job: Job) -> dict[str, tuple[str, str]]:
    """Value and reason of each variable of torchrun and its ranks."""
    timeout_s = str(job.stop_s - SAVE_MARGIN_S // 2)
    why = "torchrun kills ranks so long after a signal: checkpoint.grace_s and time to end; older torch: 30 s"
    return {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": (timeout_s, why), **job.environment}


def run_program(words: Sequence[str], text: str, install: str) -> int:
    """Run the program of a scheduler with ``text`` as its input; what it prints is for the user.

    Raises:
        MissingInput: the program is not installed; ``install`` tells what to do.
        IOFailure: it failed.
    """
    try:
        code = subprocess.run(words, input=text, text=True).returncode
    except FileNotFoundError:
        raise MissingInput(f"{words[0]} is not installed on this machine. {install}") from None
    if code:
        raise IOFailure(
            f"{shlex.join(words[:2])} failed with exit code {code}, and the run is not submitted. See above."
        )
    return 0
