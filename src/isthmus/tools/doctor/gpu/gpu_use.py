"""Free memory, other processes, memory errors and the link of each GPU."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from isthmus.tools.doctor.findings import Finding, error, ok, warning
from isthmus.tools.doctor.gpu.gpu_tools import GpuUse, amd_use, nvidia_use
from isthmus.tools.doctor.gpu.gpus import find_gpus
from isthmus.tools.doctor.gpu.torch_build import used_gpus
from isthmus.tools.doctor.machine import Machine, ToolFailed

_SUBJECT = "GPU use"
_KERNEL_LOG = ("dmesg", "--level", "emerg,alert,crit,err,warn")
_GPU_ERROR = re.compile(
    r"NVRM: Xid|NVRM: .*fallen off the bus|amdgpu.*(ring \S+ timeout|GPU reset|uncorrectable|page fault|hang)|"
    r"amdgpu.*Failed to|\[drm:amdgpu.*\*ERROR\*|pcieport.*(Uncorrected|Fatal)"
)
_IDLE_BYTES = 2 * 2**30
"""Drivers, and a desktop, use less."""


def check_gpu_use(machine: Machine) -> Iterator[Finding]:
    gpus = used_gpus(find_gpus(machine))
    for vendor, read in (("AMD", amd_use), ("NVIDIA", nvidia_use)):
        if not any(gpu.vendor == vendor for gpu in gpus):
            continue
        try:
            use = read(machine)
        except ToolFailed as failure:
            yield warning(
                _SUBJECT,
                f"memory and processes of {vendor} GPUs are unknown: {failure}",
                "Install the tool, or pass it to the container. A tool that does not answer is a sign of a GPU that "
                "hangs (look at dmesg), or of a driver that starts for each command (sudo nvidia-smi -pm 1).",
                "nvidia-smi" if vendor == "NVIDIA" else "amd-smi, rocm-smi",
            )
            continue
        yield from _memory(use)
        yield from _memory_errors(use)
    for gpu in gpus:
        mode = machine.read(f"{gpu.folder}/current_compute_partition") or "SPX"
        if mode != "SPX":
            yield warning(
                _SUBJECT,
                f"GPU {gpu.address} is divided into several devices with a part of its memory each ({mode})",
                "Large models need whole devices: sudo amd-smi set --compute-partition SPX.",
                f"{gpu.folder}/current_compute_partition",
            )
        width, widest = (machine.read(f"{gpu.folder}/{name}_link_width") for name in ("current", "max"))
        if width and widest and width.isdigit() and widest.isdigit() and 0 < int(width) < int(widest):
            yield warning(
                _SUBJECT,
                f"GPU {gpu.address} uses {width} of its {widest} PCIe lanes, so copies from and to it are slower",
                "Reseat it, or look for a slot with more lanes; in the firmware, for a setting that divides them.",
                f"{gpu.folder}/current_link_width",
            )


def check_kernel_log(machine: Machine) -> Iterator[Finding]:
    """Errors that the drivers of the GPUs have reported since the machine started."""
    if not find_gpus(machine):
        return
    source = " ".join(_KERNEL_LOG)
    try:
        lines = [line for line in machine.run_tool(_KERNEL_LOG).splitlines() if _GPU_ERROR.search(line)]
    except ToolFailed as failure:
        yield ok("kernel log", f"errors of GPUs are unknown: {failure}", source)
        return
    if lines:
        yield warning(
            "kernel log",
            f"{len(lines)} errors of GPUs, the last one: {lines[-1].strip()[:200]}",
            "If runs fail or hang on this GPU, reset it or reboot. For the numbers of NVIDIA's Xid errors, see its "
            "documentation; 48, 63, 64, 74, 79, 94 and 95 are faults of memory, links or the board.",
            source,
        )
    else:
        yield ok("kernel log", "no error of a GPU since the machine started", source)


def _memory(use: GpuUse) -> Iterator[Finding]:
    owners = defaultdict(list)
    for process in use.processes:
        size = "" if process.used_bytes is None else f", {process.used_bytes / 2**30:.1f} GiB"
        owners[process.gpu].append(f"{process.name} ({process.pid}{size})")
    busy = [gpu for gpu in use.gpus if gpu.used_bytes > _IDLE_BYTES or owners[gpu.index]]
    for gpu in busy:
        by = f" by {', '.join(owners[gpu.index][:4])}" if owners[gpu.index] else ""
        yield warning(
            _SUBJECT,
            f"GPU {gpu.index}: {gpu.used_bytes / 2**30:.1f} of {gpu.total_bytes / 2**30:.0f} GiB are used{by}",
            "A run on this GPU has less memory and is slower. End the process if it is yours (a rank of an earlier "
            "run may be left: ps -fp PID), or select other GPUs with CUDA_VISIBLE_DEVICES.",
            use.source,
        )
    if owners[""]:
        yield warning(
            _SUBJECT,
            f"processes on the GPUs: {', '.join(owners[''][:8])}",
            "A run beside them has less memory and is slower. End those that are yours.",
            use.source,
        )
    if free := [gpu for gpu in use.gpus if gpu not in busy]:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in free if gpu.name))
        least = min(gpu.total_bytes - gpu.used_bytes for gpu in free)
        yield ok(
            _SUBJECT,
            f"{len(free)} of {len(use.gpus)} GPUs are free{f' ({names})' if names else ''}, each with "
            f"{least / 2**30:.0f} GiB or more",
            use.source,
        )


def _memory_errors(use: GpuUse) -> Iterator[Finding]:
    for gpu in use.gpus:
        if gpu.uncorrected_errors:
            yield error(
                _SUBJECT,
                f"GPU {gpu.index} has had {gpu.uncorrected_errors} uncorrected memory errors since its driver started",
                "Runs on it fail or compute wrong values. Reset it or reboot; replace it if the number grows again.",
                use.source,
            )
