"""Whether this user can open the device files of the GPUs."""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from isthmus.tools.doctor.findings import Finding, error, ok, warning
from isthmus.tools.doctor.gpu.gpus import find_gpus, gpu_files
from isthmus.tools.doctor.gpu.torch_build import used_gpus
from isthmus.tools.doctor.machine import Machine

_SUBJECT = "device files"


def check_device_files(machine: Machine) -> Iterator[Finding]:
    vendors = {gpu.vendor for gpu in used_gpus(find_gpus(machine))}
    if "AMD" in vendors:
        files = ["/dev/kfd", *(gpu_files(machine, "AMD") or ["/dev/dri/renderD128"])]
        yield from _files(machine, files, "start the container with --device /dev/kfd --device /dev/dri")
    if "NVIDIA" in vendors:
        files = ["/dev/nvidiactl", *(gpu_files(machine, "NVIDIA") or ["/dev/nvidia0"])]
        passing = "start the container with --gpus all (NVIDIA's container toolkit)"
        yield from _files(machine, files, passing)
        if machine.path(files[0]).exists() and not machine.path("/dev/nvidia-uvm").exists():
            yield warning(
                _SUBJECT,
                "/dev/nvidia-uvm does not exist, without which CUDA does not start",
                f"The first use of CUDA creates it, or nvidia-modprobe -u -c 0; in a container, {passing}.",
                "/dev/nvidia-uvm",
            )


def _files(machine: Machine, files: list[str], passing: str) -> Iterator[Finding]:
    usable = []
    for file in files:
        problem = _problem(machine, machine.path(file), passing)
        if problem is None:
            usable.append(file)
        else:
            yield error(_SUBJECT, f"{file} {problem[0]}", problem[1], file)
    if usable:
        shown = usable if len(usable) < 4 else [*usable[:2], "...", usable[-1]]
        yield ok(_SUBJECT, f"{', '.join(shown)} can be opened", "permissions and open")


def _problem(machine: Machine, path: Path, passing: str) -> tuple[str, str] | None:
    """Text and hint; None: the file can be opened for reading and writing."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return "does not exist", f"In a container, {passing}. Without one, the driver is not loaded."
    except OSError as failure:
        return f"cannot be examined: {failure.strerror}", "Look at the permissions of its folder."
    if not _allowed(machine, status):
        group = _group_name(status.st_gid)
        return (
            f"belongs to group {group}, and this user is not in it",
            f"sudo usermod -a -G {group} $USER, then log in again; in a container, --group-add {status.st_gid} (the "
            "number, since names of groups differ between image and machine).",
        )
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as failure:
        return f"cannot be opened: {failure.strerror}", f"Its permissions allow it. In a container, {passing}."
    return None


def _allowed(machine: Machine, status: os.stat_result) -> bool:
    if machine.user == 0:
        return True
    needed = stat.S_IROTH | stat.S_IWOTH
    shift = 6 if status.st_uid == machine.user else 3 if status.st_gid in machine.groups else 0
    return status.st_mode >> shift & needed == needed


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
