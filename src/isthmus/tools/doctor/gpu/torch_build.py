"""Whether the installed torch is built for the GPUs of this machine, and whether their driver can run it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from isthmus.tools.doctor.findings import Finding, error, ok, warning
from isthmus.tools.doctor.gpu.gpus import Gpu, Vendor, count_by_vendor, find_gpus
from isthmus.tools.doctor.machine import Machine

_SUBJECT = "torch"
_SELECTOR = 'PyTorch\'s "Get started" page has a selector'
_BUILDS: dict[Vendor, Literal["ROCm", "CUDA"]] = {"AMD": "ROCm", "NVIDIA": "CUDA"}
_WINDOWS_GPU = "/dev/dxg"
NVIDIA_DRIVER = "/proc/driver/nvidia/version"
_COMPATIBILITY = "/usr/local/cuda/compat"
_FIRST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""The oldest driver for each major version of CUDA, from the release notes of the CUDA toolkit."""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    version: str
    cuda: str | None
    hip: str | None

    @property
    def kind(self) -> Literal["ROCm", "CUDA", "CPU"]:
        # HIP first: a ROCm build may have a CUDA version too.
        return "ROCm" if self.hip else "CUDA" if self.cuda else "CPU"

    def __str__(self) -> str:
        number = self.hip or self.cuda
        return f"torch {self.version}, built for {self.kind}{f' {number}' if number else 's'}"


def installed_torch(folder: Path | None = None) -> TorchBuild | None:
    """The build in ``folder``, or the installed one, without importing it; None if there is none."""
    if folder is None:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        folder = Path(spec.origin).parent
    text = (folder / "version.py").read_text(encoding="utf-8")
    assigned = {name: _assigned(text, name) for name in ("__version__", "cuda", "hip")}
    return TorchBuild(assigned["__version__"] or "of an unknown version", assigned["cuda"], assigned["hip"])


def _assigned(text: str, name: str) -> str | None:
    match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]*)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def used_gpus(gpus: list[Gpu]) -> list[Gpu]:
    """GPUs that the installed torch is built for, else those of data centers; a processor may have another vendor's."""
    build = installed_torch()
    supported = [gpu for gpu in gpus if build is not None and _BUILDS[gpu.vendor] == build.kind]
    return supported or [gpu for gpu in gpus if not gpu.for_display]


def check_torch_build(machine: Machine) -> Iterator[Finding]:
    build, gpus = installed_torch(), find_gpus(machine)
    if build is None:
        yield error(_SUBJECT, "torch is not installed", f"Install it first: {_SELECTOR}.", "importlib")
        return
    if not gpus and machine.path(_WINDOWS_GPU).exists():
        yield ok(_SUBJECT, f"{build}; Windows has the GPUs, and WSL no files about them", _WINDOWS_GPU)
        return
    yield from match_build(build, gpus)
    vendors = {gpu.vendor for gpu in used_gpus(gpus)}
    if "NVIDIA" in vendors:
        yield from _nvidia_driver(machine, build)
    if "AMD" in vendors:
        yield from _amd_driver(machine)


def match_build(build: TorchBuild, gpus: list[Gpu]) -> Iterator[Finding]:
    source, present = "torch/version.py, /sys/bus/pci", count_by_vendor(gpus)
    text = f"{build}; this machine has {present}"
    builds = [_BUILDS[vendor] for vendor in ("AMD", "NVIDIA") if any(gpu.vendor == vendor for gpu in gpus)]
    hint = f"Install a {' or '.join(builds)} build of torch: {_SELECTOR}."
    if build.kind in builds or not (builds or build.kind != "CPU"):
        yield ok(_SUBJECT, text, source)
    elif not builds:
        yield warning(
            _SUBJECT,
            text,
            "Runs use the CPU. If there are GPUs, they are not passed to this container or virtual machine: start it "
            "with --device /dev/kfd --device /dev/dri (AMD) or --gpus all (NVIDIA).",
            source,
        )
    elif build.kind == "CPU" and all(gpu.for_display for gpu in gpus):
        yield warning(_SUBJECT, f"{text}; runs use the CPU", hint, source)
    else:
        yield error(_SUBJECT, f"{text}; it cannot use them", hint, source)


def _nvidia_driver(machine: Machine, build: TorchBuild) -> Iterator[Finding]:
    text = machine.read(NVIDIA_DRIVER)
    match = re.search(r"Kernel Module.*?\s(\d+)\.(\d+)(?:\.\d+)?", text or "")
    if match is None:
        other = "; nouveau, which cannot compute, is" if machine.path("/sys/module/nouveau").exists() else ""
        yield error(
            _SUBJECT,
            f"the driver of NVIDIA is not loaded{other}",
            "Install it, or load it with modprobe nvidia; after an update of the kernel or the driver, reboot.",
            NVIDIA_DRIVER,
        )
        return
    version, numbers = match[0].split()[-1], (int(match[1]), int(match[2]))
    needed = _FIRST_DRIVER.get(int((build.cuda or "0").partition(".")[0]), (0, 0))
    if build.kind == "CUDA" and numbers < needed and machine.names(_COMPATIBILITY):
        yield warning(
            _SUBJECT,
            f"driver {version} is older than {needed[0]}.{needed[1]:02}, which CUDA {build.cuda} needs; this container "
            f"has libraries that replace a part of it ({_COMPATIBILITY})",
            "They work on data center GPUs. isthmus doctor without --quick shows whether torch sees the GPUs.",
            NVIDIA_DRIVER,
        )
    elif build.kind == "CUDA" and numbers < needed:
        yield error(
            _SUBJECT,
            f"driver {version} is too old for CUDA {build.cuda}, which needs {needed[0]}.{needed[1]:02}",
            f"Update the driver, or install a build of torch for an older CUDA: {_SELECTOR}.",
            NVIDIA_DRIVER,
        )
    else:
        yield ok(_SUBJECT, f"driver {version} of NVIDIA", NVIDIA_DRIVER)


def _amd_driver(machine: Machine) -> Iterator[Finding]:
    module = "/sys/module/amdgpu"
    if not machine.path(module).exists():
        yield error(
            _SUBJECT,
            "the driver of AMD (amdgpu) is not loaded",
            "Install it with ROCm, or load it with modprobe amdgpu; after an update of the kernel, reboot.",
            module,
        )
        return
    version = machine.read(f"{module}/version")
    rocm = machine.read("/opt/rocm/.info/version")
    parts = [f"amdgpu {version}" if version else "amdgpu of the kernel", f"ROCm {rocm}" if rocm else ""]
    yield ok(_SUBJECT, f"driver {', '.join(filter(None, parts))}", f"{module}, /opt/rocm/.info/version")
