"""NUMA: balancing of pages by the kernel, the cores beside each GPU, and the translation of addresses of devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from isthmus.platforms.rank_env import slurm_tasks_here
from isthmus.tools.doctor.findings import Finding, ok, warning
from isthmus.tools.doctor.gpu.gpus import find_gpus
from isthmus.tools.doctor.machine import Machine

_NODES, _BALANCING = "/sys/devices/system/node", "/proc/sys/kernel/numa_balancing"


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
