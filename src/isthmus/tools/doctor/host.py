"""Processor, memory, NUMA and clock."""

from __future__ import annotations

import math
import platform
import re
from collections import defaultdict
from collections.abc import Iterator

from isthmus.platforms.control_groups import cpu_limits, memory_limits
from isthmus.platforms.rank_env import slurm_tasks_here
from isthmus.tools.doctor.findings import Finding, ok, warning, warning_unless
from isthmus.tools.doctor.gpu.gpus import find_gpus
from isthmus.tools.doctor.machine import Machine

_CPU = "/sys/devices/system/cpu"
_CORES_PER_GPU = 2
_LEAST_MEMORY = 8 * 2**30
_NODES, _BALANCING = "/sys/devices/system/node", "/proc/sys/kernel/numa_balancing"


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


def check_numa(machine: Machine) -> Iterator[Finding]:
    nodes = [name for name in machine.names(_NODES) if name[:4] == "node" and name[4:].isdigit()]
    if len(nodes) > 1 and machine.read(_BALANCING) not in ("0", None):
        yield warning(
            "NUMA",
            f"the kernel moves pages between {len(nodes)} nodes (numa_balancing is on), which stalls GPUs and threads",
            "sudo sysctl kernel.numa_balancing=0; to keep it, a file in /etc/sysctl.d. AMD and NVIDIA advise it.",
            _BALANCING,
        )
    else:
        yield ok("NUMA", f"{max(1, len(nodes))} node{'s' * (len(nodes) > 1)}, pages stay where they are", _BALANCING)
    if len(nodes) > 1:
        yield from _affinity(machine)
    yield from _address_translation(machine)


def _affinity(machine: Machine) -> Iterator[Finding]:
    near = defaultdict(list)
    for gpu in find_gpus(machine):
        near[gpu.numa_node].append(gpu.address)
    for node, gpus in sorted(near.items()):
        if node < 0:
            yield warning(
                "NUMA",
                f"the node of {len(gpus)} GPUs is unknown, so ranks cannot be placed near them",
                "A virtual machine may hide it. On real hardware, update the firmware.",
                "/sys/bus/pci/devices/*/numa_node",
            )
            continue
        cores = _numbers(machine.read(f"{_NODES}/node{node}/cpulist") or "")
        if not cores & machine.cores and slurm_tasks_here(machine.environment) == 1:  # else other tasks may have them
            yield warning(
                "NUMA",
                f"this process has no core of node {node}, where {len(gpus)} GPUs are ({', '.join(gpus[:4])})",
                "Copies to these GPUs cross the processors. Give the job cores of each node: --exclusive or "
                "--gpu-bind=closest of Slurm, --cpuset-cpus of docker.",
                f"{_NODES}/node{node}/cpulist, affinity",
            )


def _address_translation(machine: Machine) -> Iterator[Finding]:
    """RCCL needs peer access between GPUs, which an IOMMU that translates slows or breaks."""
    gpus = [gpu for gpu in find_gpus(machine) if gpu.vendor == "AMD" and not gpu.for_display]
    types = {machine.read(f"{gpu.folder}/iommu_group/type") for gpu in gpus}
    if any((kind or "").startswith("DMA") for kind in types):
        yield warning(
            "NUMA",
            "an IOMMU translates the addresses of the GPUs, which slows copies between them and may hang RCCL",
            "Add iommu=pt to the kernel's command line and reboot, unless the GPUs are those of a virtual machine.",
            "/sys/bus/pci/devices/*/iommu_group/type",
        )


def _numbers(text: str) -> set[int]:
    """``0-2,8`` -> {0, 1, 2, 8}."""
    ends = [part.split("-") for part in text.split(",") if part]
    return {number for part in ends for number in range(int(part[0]), int(part[-1]) + 1)}
