"""The environment of a rank, and of jobs of Slurm and Kubernetes: what process group initialization depends on."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from isthmus.errors import UsageError
from isthmus.platforms import rank_env
from isthmus.tools.doctor.findings import Finding, error, ok, warning
from isthmus.tools.doctor.gpu.gpus import find_gpus
from isthmus.tools.doctor.machine import Machine

_RANK = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
_WORLD = ("RANK", "WORLD_SIZE")
_ONE_CORE = 2
"""Logical cores of a core."""


def check_job(machine: Machine) -> Iterator[Finding]:
    environment = dict(machine.environment)  # a Slurm task gets more variables
    yield from _slurm(machine)
    if "KUBERNETES_SERVICE_HOST" in environment:
        yield ok("job", "a pod of Kubernetes; its limits are below processor and memory", "KUBERNETES_SERVICE_HOST")
    present = [name for name in _WORLD if name in environment]
    if len(present) == 1:
        missing = next(name for name in _WORLD if name not in environment)
        yield error(
            "job",
            f"{present[0]} is set, but {missing} is not",
            "Start ranks with torchrun or srun, or unset it for a run with --nproc.",
            present[0],
        )
        return
    try:
        if not rank_env.is_one_of_several_ranks(environment):
            yield ok("job", "no launcher has set ranks: --nproc starts them", ", ".join(_WORLD))
            return
        address, port = rank_env.master(environment)
        rank, size, local, here = (int(environment.get(name) or default) for name, default in _RANK.items())
    except (UsageError, ValueError) as failure:
        yield error("job", str(failure), "Correct the variable, or start with torchrun or srun.", ", ".join(_RANK))
        return
    yield from _rendezvous(address, port, rank, size, several=size > here)
    if not (0 <= rank < size and 0 <= local < here):
        yield error(
            "job",
            f"RANK={rank} of WORLD_SIZE={size}, LOCAL_RANK={local} of LOCAL_WORLD_SIZE={here}: ranks count from 0",
            "Let torchrun or srun set them.",
            ", ".join(_RANK),
        )


def _rendezvous(address: str, port: int, rank: int, size: int, *, several: bool) -> Iterator[Finding]:
    text, source = f"rank {rank} of {size}, rendezvous at {address}:{port}", "MASTER_ADDR, MASTER_PORT"
    try:
        resolved = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as failure:
        yield error(
            "job",
            f"{text}: the name cannot be resolved ({failure})",
            "Set MASTER_ADDR to an address of the machine of rank 0 that all machines reach, such as that of ip addr.",
            source,
        )
        return
    if several and (str(resolved).startswith("127.") or resolved == "::1"):
        yield error(
            "job",
            f"{text} ({resolved}), which is this machine, and the ranks are on several",
            "Set MASTER_ADDR to the address of the first machine, the same on all of them.",
            source,
        )
    else:
        yield ok("job", f"{text} ({resolved})", source)


def _slurm(machine: Machine) -> Iterator[Finding]:
    values = machine.environment
    if "SLURM_JOB_ID" not in values:
        return
    nodes, tasks = values.get("SLURM_JOB_NUM_NODES", "1"), values.get("SLURM_NTASKS", "1")
    in_step = "SLURM_STEP_NUM_TASKS" in values
    text = f"job {values['SLURM_JOB_ID']} of Slurm: {nodes} nodes, {tasks} tasks"
    yield ok("job", text if in_step else f"{text}; srun starts one rank for each task", "SLURM_JOB_ID, SLURM_NTASKS")
    asked = values.get("SLURM_CPUS_PER_TASK", "1")
    if in_step and values["SLURM_STEP_NUM_TASKS"] != "1" and asked == "1" and len(machine.cores) <= _ONE_CORE:
        yield warning(
            "job",
            "each task has one core, so a rank prepares batches and starts kernels on the same core",
            "#SBATCH --cpus-per-task=8, and the same option of srun, which does not take it from sbatch.",
            "SLURM_CPUS_PER_TASK",
        )
    slurm_gpus = values.get("SLURM_GPUS_ON_NODE", "")
    if not slurm_gpus and find_gpus(machine) and not {"SLURM_JOB_GPUS", "SLURM_STEP_GPUS"} & values.keys():
        yield warning(
            "job",
            "the job has asked for no GPU, and this machine has some",
            "#SBATCH --gpus-per-node=8 (or --gres=gpu:8).",
            "SLURM_GPUS_ON_NODE, SLURM_JOB_GPUS",
        )
