"""Machines that are not this one: files below a folder, and what tools print."""

from __future__ import annotations

import json
import resource
from collections import namedtuple
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.tools.doctor.findings import Check, Finding
from isthmus.tools.doctor.machine import Machine, ToolFailed

Usage = namedtuple("Usage", "total used free")
GIB = 2**30
HOST = {
    "/proc/cpuinfo": "processor : 0\nmodel name : AMD EPYC 9654\n\nprocessor : 1\nmodel name : another\n",
    "/proc/meminfo": "MemTotal:     2113000000 kB\nMemAvailable:  1900000000 kB\nHugePages_Total: 0\n",
    "/proc/sys/kernel/numa_balancing": "0",
    "/proc/mounts": "/dev/nvme0n1p2 / ext4 rw 0 0\n",
    **{f"/sys/devices/system/cpu/cpu{core}/online": "1" for core in range(64)},
    "/sys/devices/system/node/node0/cpulist": "0-31",
    "/sys/devices/system/node/node1/cpulist": "32-63",
}


RDMA = {
    "/dev/infiniband/uverbs0": "",
    **{f"/sys/class/infiniband/rdma{n}/ports/1/state": "4: ACTIVE" for n in range(2)},
    **{f"/sys/class/infiniband/rdma{n}/ports/1/rate": "400 Gb/sec (4X NDR)" for n in range(2)},
    **{f"/sys/class/infiniband/rdma{n}/ports/1/link_layer": "Ethernet" for n in range(2)},
    **{f"/sys/class/infiniband/rdma{n}/ports/1/gids/3": "0000:0000:0000:0000:0000:ffff:0a01:0004" for n in range(2)},
}


def mi300x(count: int = 8) -> dict[str, str]:
    """A node with MI300X: PCI, the compute driver, and device files."""
    files = dict(HOST) | {"/sys/module/amdgpu/version": "6.12.12", "/opt/rocm/.info/version": "6.4.1-83"}
    files["/sys/class/kfd/kfd/topology/nodes/0/properties"] = "cpu_cores_count 96\nsimd_count 0\n"
    for index in range(count):
        address = f"0000:{0x05 + 0x10 * index:02x}:00.0"
        files |= {
            f"/sys/bus/pci/devices/{address}/vendor": "0x1002",
            f"/sys/bus/pci/devices/{address}/class": "0x120000",
            f"/sys/bus/pci/devices/{address}/numa_node": str(index // 4),
            f"/sys/bus/pci/devices/{address}/current_link_width": "16",
            f"/sys/bus/pci/devices/{address}/max_link_width": "16",
            f"/sys/bus/pci/devices/{address}/mem_info_vram_total": str(192 * GIB),
            f"/sys/bus/pci/devices/{address}/mem_info_vram_used": str(300 << 20),
            f"/sys/class/kfd/kfd/topology/nodes/{index + 1}/properties": (
                f"cpu_cores_count 0\nsimd_count 1216\ngfx_target_version 90402\ndomain 0\n"
                f"location_id {(0x05 + 0x10 * index) << 8}\ndrm_render_minor {128 + index}\n"
            ),
            f"/dev/dri/renderD{128 + index}": "",
        }
    return files | {"/dev/kfd": ""}


def h100(count: int = 8, driver: str = "570.86.15") -> dict[str, str]:
    files = dict(HOST)
    files["/proc/driver/nvidia/version"] = (
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build  (dvs-builder@U16)\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
    )
    for index in range(count):
        folder = f"/sys/bus/pci/devices/0000:{0x18 + 8 * index:02x}:00.0"
        files |= {f"{folder}/vendor": "0x10de", f"{folder}/class": "0x030200", f"{folder}/numa_node": str(index // 4)}
        files[f"/dev/nvidia{index}"] = ""
    bridge = "/sys/bus/pci/devices/0000:06:00.0"  # an NVSwitch
    return files | {f"{bridge}/vendor": "0x10de", f"{bridge}/class": "0x068000", "/dev/nvidiactl": "",
                    "/dev/nvidia-uvm": ""}  # fmt: skip


def simulate(
    root: Path,
    files: Mapping[str, str],
    *,
    tools: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    **parts: Any,
) -> Machine:
    """``tools`` are outputs by the beginning of the command."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(command: Sequence[str]) -> str:
        line = " ".join(command)
        for start, output in (tools or {}).items():
            if line.startswith(start):
                return output
        raise ToolFailed(f"{command[0]} is not installed")

    usual: dict[str, Any] = {
        "folder": root, "user": 1000, "groups": frozenset({1000}), "cores": frozenset(range(64)), "run_tool": run,
        "disk_usage": lambda path: Usage(4000 * GIB, 0, 4000 * GIB), "clock_state": lambda: 0,
        "limit": lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    }  # fmt: skip
    return Machine(root=root, environment=dict(environment or {}), **(usual | parts))


def findings(check: Check, machine: Machine) -> list[Finding]:
    results = list(check(machine))
    assert all(item.source and item.text and bool(item.hint) == (item.level != "ok") for item in results)
    return results


def levels(findings: Sequence[Finding]) -> list[str]:
    return [item.level for item in findings]


NVIDIA_GPUS = """\
0, GPU-11111111-2222-3333-4444-555555555555, NVIDIA H100 80GB HBM3, 81559, 70321, 0
1, GPU-aaaaaaaa-2222-3333-4444-555555555555, NVIDIA H100 80GB HBM3, 81559, 4, 3
WARNING: infoROM is corrupted at gpu 0000:18:00.0
"""
NVIDIA_PROCESSES = """\
GPU-11111111-2222-3333-4444-555555555555, 4711, /usr/bin/python3, 70304
GPU-11111111-2222-3333-4444-555555555555, 4712, [Not Found], [N/A]
"""
AMD_METRIC = json.dumps(
    [
        {"gpu": index, "mem_usage": {"total_vram": {"value": 196592, "unit": "MB"},
         "used_vram": {"value": used, "unit": "MB"}, "free_vram": {"value": 196592 - used, "unit": "MB"}},
         "ecc": {"total_correctable_count": 4, "total_uncorrectable_count": errors}}
        for index, used, errors in ((0, 283, 0), (1, 98304, 2))
    ],
    indent=4,
)  # fmt: skip
AMD_PROCESS = json.dumps(
    [
        {"gpu": 0, "process_list": [{"process_info": "No running processes detected"}]},
        {"gpu": 1, "process_list": [{"process_info": {"name": "python3.12", "pid": 4711, "memory_usage": {
            "gtt_mem": {"value": 2097152, "unit": "B"}, "vram_mem": {"value": 103079215104, "unit": "B"}}}}]},
    ],
    indent=4,
)  # fmt: skip
ROCM_SMI = json.dumps(
    {
        "card0": {"Card Series": "AMD Instinct MI300X OAM", "VRAM Total Memory (B)": str(192 * GIB),
                  "VRAM Total Used Memory (B)": "297009152"},
        "card1": {"Card series": "AMD Instinct MI300X OAM", "VRAM Total Memory (B)": str(192 * GIB),
                  "VRAM Total Used Memory (B)": str(96 * GIB)},
        "system": {"PID4711": "python3, 1, 103079215104, 0, 0"},
    }
)  # fmt: skip
