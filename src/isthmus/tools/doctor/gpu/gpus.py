"""The GPUs of the machine, from files of the kernel: also those that torch cannot use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from isthmus.tools.doctor.machine import Machine

Vendor = Literal["AMD", "NVIDIA"]
PCI, KFD = "/sys/bus/pci/devices", "/sys/class/kfd/kfd/topology/nodes"
_VENDORS: dict[str, Vendor] = {"0x1002": "AMD", "0x10de": "NVIDIA"}
_DISPLAY = "0x0300"
_CLASSES = (_DISPLAY, "0x0302", "0x0380", "0x1200")
"""PCI classes: VGA, 3D controller, other display, processing accelerator. Data center GPUs are of the last three."""


@dataclass(frozen=True, slots=True)
class Gpu:
    vendor: Vendor
    address: str
    """PCI address, such as ``0000:0c:00.0``."""
    for_display: bool
    """A card for desktops, or a GPU in a processor."""
    arch: str = ""
    """Such as ``gfx942``; of AMD GPUs whose driver runs."""
    numa_node: int = -1

    @property
    def folder(self) -> str:
        return f"{PCI}/{self.address}"


def find_gpus(machine: Machine) -> list[Gpu]:
    """In the order of their PCI addresses."""
    archs = {_address(node): arch_name(int(node.get("gfx_target_version", 0))) for node in _compute_nodes(machine)}
    gpus = []
    for address in machine.names(PCI):
        folder = f"{PCI}/{address}"
        vendor = _VENDORS.get(machine.read(f"{folder}/vendor") or "")
        pci_class = (machine.read(f"{folder}/class") or "")[:6]
        if vendor is None or pci_class not in _CLASSES:
            continue
        node = machine.read(f"{folder}/numa_node") or ""
        numa = int(node) if re.fullmatch(r"-?\d+", node) else -1
        gpus.append(Gpu(vendor, address, pci_class == _DISPLAY, archs.get(address, ""), numa))
    return gpus


def gpu_files(machine: Machine, vendor: Vendor) -> list[str]:
    """One device file for each GPU, or partition of one, that this machine or container has access to."""
    if vendor == "NVIDIA":
        return [f"/dev/{name}" for name in machine.names("/dev") if name[:6] == "nvidia" and name[6:].isdigit()]
    present = [name for name in machine.names("/dev/dri") if name.startswith("renderD")]
    # GPUs of other vendors have such files, too.
    amd_nodes = {f"renderD{node['drm_render_minor']}" for node in _compute_nodes(machine) if "drm_render_minor" in node}
    return [f"/dev/dri/{name}" for name in present if not amd_nodes or name in amd_nodes]


def _compute_nodes(machine: Machine) -> Iterator[dict[str, str]]:
    """Properties of each AMD GPU that the compute driver knows and this container may read."""
    for node in machine.names(KFD):
        values = machine.values(f"{KFD}/{node}/properties", separator=" ")
        if values.get("simd_count", "0") != "0":  # else a CPU
            yield values


def _address(node: dict[str, str]) -> str:
    location, domain = int(node.get("location_id", 0)), int(node.get("domain", 0))
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def arch_name(version: int) -> str:
    """90402 -> ``gfx942``, 90010 -> ``gfx90a``, 110001 -> ``gfx1101``."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""


def count_by_vendor(gpus: list[Gpu]) -> str:
    """Such as ``8 AMD GPUs (gfx942)``."""
    parts = []
    for vendor in ("AMD", "NVIDIA"):
        vendor_gpus = [gpu for gpu in gpus if gpu.vendor == vendor]
        archs = ", ".join(sorted({gpu.arch for gpu in vendor_gpus} - {""}))
        if vendor_gpus:
            parts.append(
                f"{len(vendor_gpus)} {vendor} GPU{'s' * (len(vendor_gpus) > 1)}{f' ({archs})' if archs else ''}"
            )
    return " and ".join(parts) or "no GPU"
