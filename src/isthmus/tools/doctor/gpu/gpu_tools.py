"""What ``nvidia-smi``, ``amd-smi`` and ``rocm-smi`` print, and the files of AMD's driver where these are missing."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass, field
from typing import Any

from isthmus.tools.doctor.gpu.gpus import KFD, find_gpus
from isthmus.tools.doctor.machine import Machine, ToolFailed, ToolTimedOut

_MIB = 2**20
_UNITS = {"B": 1, "KB": 2**10, "MB": _MIB, "GB": 2**30}


@dataclass(frozen=True, slots=True)
class GpuProcess:
    pid: int
    name: str
    used_bytes: int | None
    """None: unknown, as in some containers."""
    gpu: str = ""
    """Empty: the tool does not tell."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    index: str
    name: str
    total_bytes: int
    used_bytes: int
    uncorrected_errors: int = 0
    """Since the driver was loaded."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    source: str
    gpus: list[GpuMemory] = field(default_factory=list)
    processes: list[GpuProcess] = field(default_factory=list)


NVIDIA_GPUS = (
    *("nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"),
    "--format=csv,noheader,nounits",
)
NVIDIA_PROCESSES = (
    *("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"),
    "--format=csv,noheader,nounits",
)
AMD_MEMORY = ("amd-smi", "metric", "--mem-usage", "--ecc", "--json")
AMD_PROCESSES = ("amd-smi", "process", "--json")
ROCM_SMI = ("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showpids", "--json")


def nvidia_use(machine: Machine) -> GpuUse:
    """A ToolFailed if the tool cannot be used."""
    use, indices = GpuUse("nvidia-smi"), {}
    for index, uuid, name, total, used, errors in _csv(machine.run_tool(NVIDIA_GPUS), 6):
        indices[uuid] = index
        use.gpus.append(GpuMemory(index, name, _mebibytes(total) or 0, _mebibytes(used) or 0, _number(errors)))
    for uuid, pid, name, size in _csv(machine.run_tool(NVIDIA_PROCESSES), 4):
        use.processes.append(GpuProcess(_number(pid), name, _mebibytes(size), indices.get(uuid, "")))
    return use


def _csv(text: str, columns: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    return [row for row in rows if len(row) == columns]  # messages of the tool come between them


def _mebibytes(text: str) -> int | None:
    return int(text) * _MIB if text.isdigit() else None  # else [N/A] or [Not Supported]


def _number(value: Any) -> int:
    return int(str(value)) if str(value).isdigit() else 0


def amd_use(machine: Machine) -> GpuUse:
    """From the first of amd-smi, rocm-smi and the files of the driver that has it; a ToolFailed if none has."""
    failures = []
    readers = [_driver_files, _rocm_smi, _amd_smi]
    while readers:
        read = readers.pop()
        try:
            if (use := read(machine)).gpus:
                return use
        except ToolFailed as failure:
            failures.append(str(failure))
            if isinstance(failure, ToolTimedOut):  # the other tool asks the same driver
                readers = [_driver_files]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as failure:
            failures.append(f"{read.__name__.strip('_')}: the output has another form ({failure!r})")
    raise ToolFailed("; ".join(failures) or "amd-smi, rocm-smi and the driver name no GPU")


def _amd_smi(machine: Machine) -> GpuUse:
    use = GpuUse("amd-smi")
    for gpu in _json_rows(machine.run_tool(AMD_MEMORY)):
        total, used = (_bytes(gpu["mem_usage"][name], "MB") for name in ("total_vram", "used_vram"))
        errors = _number(gpu.get("ecc", {}).get("total_uncorrectable_count", 0))
        use.gpus.append(GpuMemory(str(gpu["gpu"]), "", total or 0, used or 0, errors))
    for gpu in _json_rows(machine.run_tool(AMD_PROCESSES)):
        for entry in gpu["process_list"]:
            process = entry["process_info"]
            if isinstance(process, dict):  # else the text that there are none
                memory = process.get("memory_usage", {}).get("vram_mem", process.get("mem_usage", "N/A"))
                use.processes.append(
                    GpuProcess(int(process["pid"]), str(process.get("name", "?")), _bytes(memory, "B"), str(gpu["gpu"]))
                )
    return use


def _json_rows(text: str) -> list[dict[str, Any]]:
    """A list, or since ROCm 7 an object with it; warnings may come first."""
    rows = _json(text)
    return list(rows["gpu_data"] if isinstance(rows, dict) else rows)


def _json(text: str) -> Any:
    """The first value that begins at the start of a line."""
    begin = re.search(r"^[\[{]", text, re.MULTILINE)
    return json.loads(text[begin.start() if begin else 0 :])


def _bytes(value: Any, unit: str) -> int | None:
    """A number with or without its unit; None for ``N/A``."""
    if isinstance(value, dict):
        value, unit = value["value"], value.get("unit", unit)
    number = re.fullmatch(r"\d+(\.\d+)?", str(value))
    return int(float(number[0]) * _UNITS[unit]) if number else None


def _rocm_smi(machine: Machine) -> GpuUse:
    use, cards = GpuUse("rocm-smi"), _json(machine.run_tool(ROCM_SMI))
    for name in sorted((key for key in cards if re.fullmatch(r"card\d+", key)), key=lambda key: int(key[4:])):
        card = {key.lower(): value for key, value in cards[name].items()}  # "Card series" became "Card Series"
        total, used = int(card["vram total memory (b)"]), int(card["vram total used memory (b)"])
        use.gpus.append(GpuMemory(name[4:], card.get("card series", ""), total, used))
    for key, text in cards.get("system", {}).items():
        # "PID4711": "python3, 8, 1234567, 0, unknown": name, number of GPUs, bytes, ...
        words = [word.strip() for word in text.split(",")]
        if re.fullmatch(r"PID\d+", key) and len(words) > 2:
            use.processes.append(GpuProcess(int(key[3:]), words[0], int(words[2]) if words[2].isdigit() else None))
    return use


def _driver_files(machine: Machine) -> GpuUse:
    use = GpuUse("/sys/bus/pci/devices/*/mem_info_vram_used, /sys/class/kfd/kfd/proc")
    for gpu in find_gpus(machine):
        total, used = (machine.read(f"{gpu.folder}/mem_info_vram_{name}") for name in ("total", "used"))
        if total is not None and used is not None:
            name = machine.read(f"{gpu.folder}/product_name") or gpu.arch
            use.gpus.append(GpuMemory(gpu.address, name, int(total), int(used)))
    folder = KFD.removesuffix("topology/nodes") + "proc"
    for pid in filter(str.isdigit, machine.names(folder)):
        sizes = [
            machine.read(f"{folder}/{pid}/{name}")
            for name in machine.names(f"{folder}/{pid}")
            if name.startswith("vram_")
        ]
        name = machine.read(f"/proc/{pid}/comm") or "a process outside this container"
        use.processes.append(GpuProcess(int(pid), name, sum(map(_number, sizes))))
    return use
