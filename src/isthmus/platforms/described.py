"""The platform of a machine that is not here: its GPUs as their data sheet describes them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from isthmus.errors import UsageError
from isthmus.platforms.base import Platform
from isthmus.platforms.cuda import CudaPlatform
from isthmus.platforms.gpu import GpuPlatform
from isthmus.platforms.parts import Part
from isthmus.platforms.rocm import RocmPlatform


def described_platform(part: Part, gpus: int, memory_bytes: int, prefer: str = "auto") -> Platform:
    """A machine with ``gpus`` GPUs.

    Raises:
        UsageError: ``prefer``, the setting ``platform``, is another platform.
    """
    kind = _DescribedRocm if part.arch.startswith("gfx") else _DescribedCuda
    if prefer not in ("auto", kind.name):
        raise UsageError(f"platform={prefer}, and {part.name} is a GPU of {kind.name}. Leave one of them out.")
    return kind(f"{gpus} x {part.name}, from its data sheet", part, gpus, memory_bytes)


@dataclass(frozen=True)
class _Described(GpuPlatform):
    sheet: Part
    gpus: int
    memory_bytes: int

    def properties(self) -> Any:
        """As ``torch.cuda.get_device_properties`` returns them."""
        digits = self.sheet.arch.partition("sm_")[2]
        major, minor = (int(digits[:-1]), int(digits[-1])) if digits else (0, 0)
        return SimpleNamespace(
            name=self.sheet.name,
            gcnArchName=self.sheet.arch,
            major=major,
            minor=minor,
            total_memory=self.memory_bytes,
        )

    def device_count(self) -> int:
        return self.gpus

    def free_host_bytes(self) -> int:
        """Unknown."""
        return sys.maxsize


class _DescribedCuda(_Described, CudaPlatform):
    pass


class _DescribedRocm(_Described, RocmPlatform):
    pass
