"""Processor, memory and clock."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Iterator

from isthmus.platforms.control_groups import cpu_limits, memory_limits
from isthmus.platforms.rank_env import slurm_tasks_here
from isthmus.tools.doctor.findings import Finding, ok, warning, warning_unless
from isthmus.tools.doctor.gpu.gpus import find_gpus
from isthmus.tools.doctor.machine import Machine

_CPU = "/sys/devices/system/cpu"
_CORES_PER_GPU = 2
_LEAST_MEMORY = 8 * 2**30


def check_processor(machine: Machine) -> Iterator[Finding]:
    info = machine.values("/proc/cpuinfo")
    name = info.get("model name") or platform.machine()
    present = max(len([name for name in machine.names(_CPU) if name[:3] == "cpu" and name[3:].isdigit()]), 1)
    limit = min(map(math.ceil, cpu_limits(machine.root)), default=present)
    cores = max(1, min(len(machine.cores), limit))
    source = "/proc/cpuinfo, affinity, /sys/fs/cgroup"
    text = f"{name}; {cores} of {present} logical cores for this process"
    gpus, tasks = len(find_gpus(machine)), slurm_tasks_here(machine.environment)
    if cores * tasks < _CORES_PER_GPU * gpus:
        yield warning(
            "processor",
            f"{text}, for {gpus} GPUs" + (f" and {tasks} tasks" if tasks > 1 else ""),
            f"Each rank needs {_CORES_PER_GPU} or more, to start kernels and to prepare batches. Raise the limit: "
            "--cpus-per-task of Slurm, limits.cpu of a pod, --cpus of docker.",
            source,
        )
    else:
        yield ok("processor", text, source)
    load = (machine.read("/proc/loadavg") or "").partition(" ")[0]
    if re.fullmatch(r"\d+\.\d+", load) and float(load) > present / 2:
        yield warning(
            "processor",
            f"other programs compute: {load} threads on {present} cores, on average over a minute",
            "They slow the ranks, and most of all training on a CPU. End them, or wait.",
            "/proc/loadavg",
        )
    threads = machine.environment.get("OMP_NUM_THREADS", "")
    if not gpus and threads.isdigit() and int(threads) < cores and "WORLD_SIZE" not in machine.environment:
        yield warning(
            "processor",
            f"OMP_NUM_THREADS={threads} leaves cores unused: a run with one rank computes on {threads} of {cores}",
            "Unset it: runs divide the cores among their ranks.",
            "OMP_NUM_THREADS",
        )
    yield from _governor(machine)


def _governor(machine: Machine) -> Iterator[Finding]:
    folder = f"{_CPU}/cpu0/cpufreq"
    governor, driver = machine.read(f"{folder}/scaling_governor"), machine.read(f"{folder}/scaling_driver") or ""
    preference = machine.read(f"{folder}/energy_performance_preference") or ""
    if governor is None:
        return  # a virtual machine
    # These drivers choose the clock themselves, by the preference; "powersave" is their normal governor.
    chooses_clock = driver.startswith("intel_pstate") or driver == "amd-pstate-epp"
    slow = preference in ("power", "balance_power") if chooses_clock else governor in ("powersave", "conservative")
    setting = f"energy preference {preference}" if chooses_clock and preference else f"governor {governor}"
    source = f"{folder}/scaling_governor"
    if slow:
        yield warning(
            "processor",
            f"{setting} ({driver or 'unknown driver'}) keeps the clock low, which slows training on CPUs and GPUs",
            "Set it: sudo cpupower frequency-set -g performance.",
            source,
        )
    else:
        yield ok("processor", f"{setting} ({driver or 'unknown driver'})", source)


def check_memory(machine: Machine) -> Iterator[Finding]:
    info = machine.values("/proc/meminfo")
    if not {"MemTotal", "MemAvailable"} <= info.keys():
        yield warning("memory", "free memory is unknown", "Mount /proc.", "/proc/meminfo")
        return
    total, free = (int(info[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    limit, kills = min(memory_limits(machine.root), default=(total, 0))
    text = f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB are free"
    if limit < total:
        text += f"; the limit of this container or job is {limit / 2**30:.1f} GiB"
    yield warning_unless(
        min(free, limit) >= _LEAST_MEMORY,
        "memory",
        text,
        "Ranks read weights and write checkpoints through host memory: free some, or raise the limit (--mem of "
        "Slurm, limits.memory of a pod, --memory of docker).",
        "/proc/meminfo, /sys/fs/cgroup",
    )
    if kills:
        yield warning(
            "memory",
            f"{kills} processes of this container or job were killed because it was out of memory",
            "A rank that ended with signal 9 was one of them. Raise the limit, or lower the number of ranks.",
            "/sys/fs/cgroup, oom_kill",
        )


def check_clock(machine: Machine) -> Iterator[Finding]:
    state = machine.clock_state()
    if state is None:
        yield ok("clock", "the kernel does not tell whether the clock follows a time server", "adjtimex")
    elif state == 5:
        yield warning(
            "clock",
            "the clock follows no time server",
            "Logs of several machines cannot be compared, and a wrong clock breaks TLS to the Hub. Start one: "
            "sudo timedatectl set-ntp true. In a virtual machine whose host sets the clock, ignore this.",
            "adjtimex",
        )
    else:
        yield ok("clock", "the clock follows a time server", "adjtimex")
