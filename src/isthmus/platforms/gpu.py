"""Common parts of CUDA and ROCm: torch uses ``torch.cuda`` for both."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch

from isthmus.platforms import rank_env
from isthmus.platforms.base import Platform

Peaks = tuple[tuple[str, Mapping[str, float]], ...]
"""(Regular expression for words of the device name, TFLOP/s by precision); the first match counts."""
EXPANDABLE_SEGMENTS = (
    "expandable_segments:True",
    "packed micro batches differ in length, and expandable memory segments do not fragment",
)
"""Value of ``PYTORCH_ALLOC_CONF``, and the reason."""
_SLICE = re.compile(r"\bMIG\b")
"""In the name of a partition; peaks are known for whole devices only."""


class GpuPlatform(Platform):
    """One GPU per rank, selected by local rank."""

    device_type = "cuda"
    collective_backend = "nccl"
    peaks: ClassVar[Peaks]

    def peak_tflops(self, precision: str) -> float | None:
        """Peak without sparsity; fp32 without TF32, the default of torch."""
        device = self.properties().name
        if _SLICE.search(device):
            return None
        for pattern, peaks in self.peaks:
            if re.search(rf"\b(?:{pattern})\b", device, re.IGNORECASE):
                return peaks.get(precision)
        return None

    def default_precision(self) -> tuple[Literal["fp32", "bf16"], str]:
        supported, why = self.supports("bf16")
        return ("bf16" if supported else "fp32"), why

    def supports(self, capability: str) -> tuple[bool, str]:
        arch = self.arch()
        unit = "arithmetic" if capability == "fp32" else "matrix cores"
        supported = capability == "fp32" or self._has_matrix_cores(capability)
        return supported, f"{arch} has {'' if supported else 'no '}{capability} {unit}"

    def memory_gib(self) -> float:
        return float(torch.cuda.max_memory_reserved()) / 2**30

    def memory_used(self) -> float:
        free, total = torch.cuda.mem_get_info()
        return 1.0 - free / total

    def memory_for_rank_bytes(self, ranks_here: int = 1) -> int:
        return int(self.properties().total_memory)

    def device_count(self) -> int | None:
        return torch.cuda.device_count()

    def describe(self) -> str:
        properties = self.properties()
        return f"{self.device_count()} x {properties.name} ({self.arch()}, {properties.total_memory / 2**30:.0f} GiB)"

    def properties(self) -> Any:
        """Properties of this rank's device; with fewer devices than ranks, of the device at rank modulo count."""
        return torch.cuda.get_device_properties(rank_env.local_rank() % max(1, torch.cuda.device_count()))

    @abstractmethod
    def arch(self) -> str:
        """Such as ``sm_90`` or ``gfx942``."""

    @abstractmethod
    def _has_matrix_cores(self, capability: str) -> bool: ...
