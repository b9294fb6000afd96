"""Limits that stop a run when it starts or hours later: shared memory, open files, locked memory, processes."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from isthmus.tools.doctor.findings import Finding, ok, warning, warning_unless
from isthmus.tools.doctor.machine import Machine
from isthmus.tools.doctor.network import RDMA

_SHM = "/dev/shm"
_LEAST_SHM = 1 << 30
_LEAST_FILES, _LEAST_PROCESSES = 4096, 4096


def check_limits(machine: Machine) -> Iterator[Finding]:
    yield from _shared_memory(machine)
    files, hard = machine.limit(resource.RLIMIT_NOFILE)
    if 0 <= files < _LEAST_FILES:
        yield warning(
            "limits",
            f"{files} open files for a process (hard limit {_shown(hard)})",
            "Ranks open connections, data files and checkpoints at the same time. ulimit -n 65536; in a container "
            "--ulimit nofile=65536:65536.",
            "getrlimit(RLIMIT_NOFILE)",
        )
    else:
        yield ok("limits", f"{_shown(files)} open files for a process", "getrlimit(RLIMIT_NOFILE)")
    locked, devices = machine.limit(resource.RLIMIT_MEMLOCK)[0], machine.names(RDMA)
    if devices and locked != resource.RLIM_INFINITY:
        yield warning(
            "limits",
            f"{locked / 2**20:.0f} MiB of locked memory, and RDMA registers buffers as locked memory",
            "NCCL and RCCL fail with 'Cannot allocate memory' or fall back to TCP. ulimit -l unlimited; in a "
            "container --ulimit memlock=-1; under Slurm, PropagateResourceLimitsExcept=MEMLOCK.",
            "getrlimit(RLIMIT_MEMLOCK)",
        )
    elif devices:
        yield ok("limits", "unlimited locked memory, for RDMA", "getrlimit(RLIMIT_MEMLOCK)")
    processes = machine.limit(resource.RLIMIT_NPROC)[0]
    if 0 <= processes < _LEAST_PROCESSES and machine.user:
        yield warning(
            "limits",
            f"{processes} processes and threads for this user",
            "Each rank has tens to hundreds of threads. ulimit -u 65536.",
            "getrlimit(RLIMIT_NPROC)",
        )


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    try:
        total, _, free = machine.disk_usage(machine.path(_SHM))
    except OSError as failure:
        yield warning(
            "limits", f"{_SHM} cannot be used: {failure.strerror}", "Mount it: mount -t tmpfs tmpfs /dev/shm.", _SHM
        )
        return
    text = f"{free / 2**30:,.2f} of {total / 2**30:,.2f} GiB of shared memory are free"
    yield warning_unless(
        free >= _LEAST_SHM,
        "limits",
        text,
        "NCCL and RCCL exchange data of ranks on a machine through it, and fail with 'No space left on device'. In a "
        "container, --ipc host or --shm-size 16g; in a pod, an emptyDir with medium Memory at /dev/shm. If it is "
        "full, delete what ended processes left there.",
        _SHM,
    )


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
