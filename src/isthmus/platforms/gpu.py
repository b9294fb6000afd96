"""What CUDA and ROCm devices have in common: torch reaches both through ``torch.cuda``."""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch

from isthmus.platforms.base import Platform

Peaks = tuple[tuple[str, Mapping[str, float]], ...]
"""(Words of a device name, peak by precision in TFLOP/s); the first that are found count."""
_SLICE = re.compile(r"\bMIG\b")
"""In the name of a device that is a part of the hardware; the peaks are those of the whole."""


class GpuPlatform(Platform):
    """One GPU to a rank, the one of its local rank."""

    device_type = "cuda"
    collective_backend = "nccl"
    peaks: ClassVar[Peaks]

    def peak_tflops(self, precision: str) -> float | None:
        """See :meth:`Platform.peak_tflops`. Without sparsity; fp32 is real fp32, as torch multiplies by default."""
        device = self.properties().name
        if _SLICE.search(device):
            return None
        for words, peaks in self.peaks:
            if re.search(rf"\b{words}\b", device, re.IGNORECASE):
                return peaks.get(precision)
        return None

    def default_precision(self) -> tuple[Literal["fp32", "bf16"], str]:
        """See :meth:`Platform.default_precision`."""
        supported, why = self.supports("bf16")
        return ("bf16" if supported else "fp32"), why

    def supports(self, capability: str) -> tuple[bool, str]:
        """See :meth:`Platform.supports`."""
        arch = self.arch()
        unit = "arithmetic" if capability == "fp32" else "matrix cores"
        supported = capability == "fp32" or self._has_matrix_cores(capability)
        if supported and capability == "fp8" and not hasattr(torch.nn.functional, "scaled_mm"):
            return False, f"{arch} has fp8 matrix cores, but torch {torch.__version__} has no scaled_mm"
        return supported, f"{arch} has {'' if supported else 'no '}{capability} {unit}"

    def memory_gib(self) -> float:
        """See :meth:`Platform.memory_gib`."""
        return float(torch.cuda.max_memory_reserved()) / 2**30

    def memory_used(self) -> float:
        """See :meth:`Platform.memory_used`."""
        free, total = torch.cuda.mem_get_info()
        return 1.0 - free / total

    def memory_for_rank_bytes(self, ranks_here: int = 1) -> int:
        """See :meth:`Platform.memory_for_rank_bytes`."""
        return int(self.properties().total_memory)

    def device_count(self) -> int | None:
        """See :meth:`Platform.device_count`."""
        return torch.cuda.device_count()

    def describe(self) -> str:
        """See :meth:`Platform.describe`."""
        properties = self.properties()
        return f"{self.device_count()} x {properties.name} ({self.arch()}, {properties.total_memory / 2**30:.0f} GiB)"

    def properties(self) -> Any:
        """Torch's record of this rank's device (the machine's devices are taken to be alike where there are fewer)."""
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        return torch.cuda.get_device_properties(rank % max(1, torch.cuda.device_count()))

    @abstractmethod
    def arch(self) -> str:
        """The vendor's name of the instruction set, such as ``sm_90`` or ``gfx942``."""

    @abstractmethod
    def _has_matrix_cores(self, capability: str) -> bool:
        """Whether the device multiplies matrices of that precision in hardware."""
