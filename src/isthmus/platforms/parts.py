"""What the data sheets of GPUs state: peak FLOP/s, memory, links within a node and network.

Sources, by vendor:

- AMD: the data sheets "AMD Instinct MI210", "MI250", "MI250X", "MI300A", "MI300X", "MI325X", "MI350X" and "MI355X
  accelerator", "CDNA 3 white paper" and "CDNA 4 white paper" (peaks, links), the product pages of Radeon GPUs.
- NVIDIA: the data sheets "V100", "T4", "A10", "A100", "L4", "L40S", "H100", "H200" and "GH200 Tensor Core GPU", "NVIDIA
  HGX B200/B300" and "GB200/GB300 NVL72", "Ada GPU architecture" and "RTX Blackwell GPU architecture" (GeForce and RTX),
  "DGX A100/H100/B200 system" (network). Headline figures with 2:4 sparsity are halved.
- ``measured_tflops``: "Measuring Max-Achievable FLOPs, Part 2" (AMD, 2025: MI300X), "Understanding TAF Alongside Peak
  FLOPs and MAF" (AMD, 2026: MI325X), and the table of maximum achievable matmul FLOPS in "Machine Learning Engineering"
  (S. Bekman, 2026: all others).

Pure data: neither torch nor the hardware is needed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from isthmus.errors import UsageError


@dataclass(frozen=True, slots=True)
class Part:
    """One device as torch counts them: an MI250X is two. Bandwidths are GB/s (1e9 bytes), links in one direction."""

    name: str
    pattern: str
    """Regular expression for words of the names that torch, drivers and users give it."""
    arch: str
    """Such as ``sm_90`` or ``gfx942``."""
    peak_tflops: Mapping[str, float]
    """Dense, by precision: ``bf16``, ``fp16``, ``tf32``, ``fp32`` (without TF32, the default of torch), ``fp8``."""
    memory_gib: float
    """What torch reports as total: less than the data sheet where the driver or error correction reserves some."""
    memory_gb_s: float
    link_gb_s: float
    """All links of a device to the others of its node together."""
    network_gb_s: float
    """Share of a device in the network of the usual server."""
    topology: Literal["switch", "mesh", "pcie"] = "switch"
    """``switch``: any two devices reach each other at full bandwidth. ``mesh``: one link to each of the joined devices,
    and PCIe to others. ``pcie``: no links.
    """
    linked_devices: int = 8
    """Devices that the links join."""
    rack: bool = False
    """The links join devices of several nodes."""
    host_gb_s: float = 64
    """To host memory and back: PCIe 5, unless a part has less, or a CPU on the same board."""
    measured_tflops: Mapping[str, float] = field(default_factory=dict)
    """Fastest GEMM that was published, by precision: clocks fall under load, so peaks are not reached."""

    def link_between(self, devices: int) -> float:
        """GB/s that a device sends to ``devices - 1`` others of its node: in a mesh over its links to them only."""
        if self.topology != "mesh" or devices == self.linked_devices:
            return self.link_gb_s
        if devices > self.linked_devices:
            return min(self.link_gb_s, self.host_gb_s)
        return self.link_gb_s * max(1, devices - 1) / (self.linked_devices - 1)


def _16_bit(tflops: float, **others: float) -> dict[str, float]:
    return {"bf16": tflops, "fp16": tflops, **others}


_HOPPER = _16_bit(989.4, tf32=494.7, fp32=66.9, fp8=1978.9)
_CDNA_3 = _16_bit(1307.4, tf32=653.7, fp32=163.4, fp8=2614.9)
_H100_MEASURED = {"bf16": 794.5, "fp8": 1402.6}
_A100 = _16_bit(312, tf32=156, fp32=19.5)
_A100_SXM_MEASURED, _A100_PCIE_MEASURED = {"bf16": 271.2}, {"bf16": 252.9}

PARTS: tuple[Part, ...] = (
    # The first match counts: special forms precede the plain name. fp32 of AMD's Instinct is that of matrix cores.
    Part("MI355X", "MI355X?", "gfx950", _16_bit(2516.6, fp32=157.3, fp8=5033.2), 287.9, 8000, 537.6, 50, "mesh",
         measured_tflops={"bf16": 1565}),
    Part("MI350X", "MI350X?", "gfx950", _16_bit(2306.9, fp32=144.2, fp8=4613.7), 287.9, 8000, 537.6, 50, "mesh"),
    Part("MI325X", "MI325X?", "gfx942", _CDNA_3, 255.9, 6000, 448, 50, "mesh",
         measured_tflops={"bf16": 831.4, "fp8": 1408.1}),
    Part("MI300X", "MI300X", "gfx942", _CDNA_3, 191.9, 5300, 448, 50, "mesh",
         measured_tflops={"bf16": 708, "fp8": 1273}),
    Part("MI300A", "MI300A", "gfx942", _16_bit(980.6, tf32=490.3, fp32=122.6, fp8=1961.2), 127.9, 5300, 384, 25, "mesh",
         linked_devices=4),
    Part("MI250X", "MI250X", "gfx90a", _16_bit(191.5, fp32=47.9), 63.9, 1638, 200, 12.5, host_gb_s=32),
    Part("MI250", "MI250", "gfx90a", _16_bit(181.0, fp32=45.3), 63.9, 1638, 150, 12.5, host_gb_s=32),
    Part("MI210", "MI210", "gfx90a", _16_bit(181.0, fp32=45.3), 63.9, 1638, 150, 12.5, "mesh", linked_devices=4,
         host_gb_s=32),
    Part("MI100", "MI100", "gfx908", {"fp16": 184.6, "bf16": 92.3, "fp32": 46.1}, 31.9, 1229, 138, 12.5, "mesh",
         linked_devices=4, host_gb_s=32),
    Part("RX 9070 XT", r"(?:RX ?)?9070 ?XT", "gfx1201", _16_bit(194.6, fp32=48.7, fp8=389.3), 15.9, 640, 64, 1.25,
         "pcie"),
    Part("R9700", r"R9700", "gfx1201", _16_bit(191.4, fp32=47.8, fp8=382.7), 31.9, 640, 64, 1.25, "pcie"),
    Part("W7900", r"W7900", "gfx1100", _16_bit(122.6, fp32=61.3), 44.9, 864, 32, 1.25, "pcie", host_gb_s=32),
    Part("RX 7900 XTX", r"(?:RX ?)?7900 ?XTX", "gfx1100", _16_bit(122.8, fp32=61.4), 23.9, 960, 32, 1.25, "pcie",
         host_gb_s=32),
    Part("RX 7800 XT", r"(?:RX ?)?7800 ?XT", "gfx1101", _16_bit(74.6, fp32=37.3), 15.9, 624, 32, 1.25, "pcie",
         host_gb_s=32),
    Part("GB300", "GB300", "sm_103", _16_bit(2500, tf32=1250, fp32=80, fp8=5000), 276, 8000, 900, 100,
         linked_devices=72, rack=True, host_gb_s=225),
    Part("GB200", "GB200", "sm_100", _16_bit(2500, tf32=1250, fp32=80, fp8=5000), 184, 8000, 900, 50,
         linked_devices=72, rack=True, measured_tflops={"bf16": 1822, "fp8": 3615.6}, host_gb_s=225),
    Part("B300", "B300", "sm_103", _16_bit(2250, tf32=1125, fp32=75, fp8=4500), 267, 8000, 900, 100,
         measured_tflops={"bf16": 1769, "fp8": 3353.3}),
    Part("B200", "B200", "sm_100", _16_bit(2250, tf32=1125, fp32=75, fp8=4500), 178.4, 8000, 900, 50,
         measured_tflops={"bf16": 1745, "fp8": 3432.5}),
    Part("H200 NVL", "H200[ -]NVL", "sm_90", _16_bit(835, tf32=417.5, fp32=60, fp8=1671), 139.8, 4800, 450, 50,
         "mesh", linked_devices=4),
    Part("H200", "H200", "sm_90", _HOPPER, 139.8, 4800, 450, 50, measured_tflops={"bf16": 794.5, "fp8": 1453.4}),
    Part("GH200 144 GB", "GH200 144 ?GB?(?: HBM3e)?", "sm_90", _HOPPER, 140, 4800, 450, 50, linked_devices=2,
         measured_tflops={"bf16": 828.6, "fp8": 1535}, host_gb_s=450),
    Part("GH200", "GH200", "sm_90", _HOPPER, 95, 4000, 450, 50, linked_devices=1, host_gb_s=450),
    Part("H100 NVL", "H100[ -]NVL", "sm_90", _16_bit(835, tf32=417.5, fp32=60, fp8=1671), 93.1, 3900, 300, 25, "mesh",
         linked_devices=2),
    Part("H100 PCIe", "H100[ -]PCIe", "sm_90", _16_bit(756, tf32=378, fp32=51, fp8=1513), 79.2, 2000, 64, 25, "pcie"),
    Part("H100", "H100", "sm_90", _HOPPER, 79.2, 3350, 450, 50, measured_tflops=_H100_MEASURED),
    Part("H800", "H800(?![ -]PCIe)", "sm_90", _HOPPER, 79.2, 3350, 200, 50, measured_tflops=_H100_MEASURED),
    Part("H20", "H20", "sm_90", _16_bit(148, tf32=74, fp32=44, fp8=296), 95.1, 4000, 450, 50),
    Part("A100 PCIe 40 GB", "A100[ -]PCIe[ -]40 ?GB", "sm_80", _A100, 39.4, 1555, 32, 12.5, "pcie",
         measured_tflops=_A100_PCIE_MEASURED, host_gb_s=32),
    Part("A100 PCIe 80 GB", "A100(?:[ -]80 ?GB)?[ -]PCIe(?:[ -]80 ?GB)?", "sm_80", _A100, 79.2, 1935, 32, 12.5, "pcie",
         measured_tflops=_A100_PCIE_MEASURED, host_gb_s=32),
    Part("A100 40 GB", "A100(?:[ -]SXM4?)?[ -]40 ?GB", "sm_80", _A100, 39.4, 1555, 300, 25,
         measured_tflops=_A100_SXM_MEASURED, host_gb_s=32),
    Part("A100 80 GB", "A100", "sm_80", _A100, 79.2, 2039, 300, 25, measured_tflops=_A100_SXM_MEASURED, host_gb_s=32),
    Part("A800", "A800", "sm_80", _A100, 79.2, 2039, 200, 25, measured_tflops=_A100_SXM_MEASURED, host_gb_s=32),
    Part("V100 16 GB", "V100(?:[ -]SXM2)?[ -]16 ?GB", "sm_70", {"fp16": 125, "fp32": 15.7}, 15.7, 900, 150, 12.5,
         host_gb_s=16),
    Part("V100", "V100(?!(?:[ -]PCIe|S))", "sm_70", {"fp16": 125, "fp32": 15.7}, 31.7, 900, 150, 12.5, host_gb_s=16),
    Part("L40S", "L40S", "sm_89", _16_bit(362, tf32=183, fp32=91.6, fp8=733), 44.4, 864, 32, 12.5, "pcie",
         host_gb_s=32),
    Part("L4", "L4", "sm_89", _16_bit(121, tf32=60.5, fp32=30.3, fp8=242.5), 22.0, 300, 32, 6.25, "pcie", host_gb_s=32),
    Part("A10", "A10", "sm_86", _16_bit(125, tf32=62.5, fp32=31.2), 22.0, 600, 32, 6.25, "pcie", host_gb_s=32),
    Part("A10G", "A10G", "sm_86", _16_bit(70, tf32=35, fp32=35), 22.0, 600, 32, 6.25, "pcie", host_gb_s=32),
    Part("T4", "T4", "sm_75", {"fp16": 65, "fp32": 8.1}, 14.6, 320, 16, 6.25, "pcie", host_gb_s=16),
    # GeForce: 16-bit and FP8 with float32 sums, half of the headline figure.
    Part("RTX PRO 6000", "RTX PRO 6000(?: Blackwell)?", "sm_120", _16_bit(503.8, tf32=251.9, fp32=126, fp8=1007.6),
         94.9, 1792, 64, 25, "pcie"),
    Part("RTX 6000 Ada", "RTX ?6000[ -]Ada", "sm_89", _16_bit(364.2, tf32=182.1, fp32=91.1, fp8=728.5), 47.4, 960, 32,
         12.5, "pcie", host_gb_s=32),
    Part("RTX A6000", "RTX ?A6000", "sm_86", _16_bit(154.8, tf32=77.4, fp32=38.7), 47.4, 768, 32, 12.5, "pcie",
         host_gb_s=32),
    Part("RTX 5090", "(?:RTX ?)?5090(?! (?:D|Laptop))", "sm_120", _16_bit(209.5, tf32=104.8, fp32=104.8, fp8=419), 31.4,
         1792, 64, 1.25, "pcie"),
    Part("RTX 4090", "(?:RTX ?)?4090(?! (?:D|Laptop))", "sm_89", _16_bit(165.2, tf32=82.6, fp32=82.6, fp8=330.3), 23.6,
         1008, 32, 1.25, "pcie", host_gb_s=32),
    Part("RTX 3090", "(?:RTX ?)?3090(?! Ti)", "sm_86", _16_bit(71, tf32=35.6, fp32=35.6), 23.7, 936, 32, 1.25, "pcie",
         host_gb_s=32),
)  # fmt: skip

_PARTITION = re.compile(r"\bMIG\b")
"""In the name of a part of a device; the table has whole devices only."""


def find_part(name: str) -> Part | None:
    """The part with this name, as torch reports it or as users write it; None if the table does not have it."""
    name = name.replace("_", " ")
    if _PARTITION.search(name):
        return None
    for part in PARTS:
        if re.search(rf"\b(?:{part.pattern})\b", name, re.IGNORECASE):
            return part
    return None


def part_named(name: str) -> Part:
    """The part that a user names.

    Raises:
        UsageError: with the nearest names.
    """
    if (part := find_part(name)) is not None:
        return part
    known = {part.name.lower(): part.name for part in PARTS}
    near = [known[match] for match in difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)]
    raise UsageError(
        f"no data of the GPU {name!r}. {'Did you mean ' + ' or '.join(near) if near else 'Use'}"
        f"{'? Known are ' if near else ' one of '}{', '.join(known.values())}. For another GPU, state its memory."
    )
