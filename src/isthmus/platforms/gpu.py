"""Common parts of CUDA and ROCm: torch uses ``torch.cuda`` for both."""

from __future__ import annotations

import os
import warnings
from abc import abstractmethod
from typing import Any, ClassVar, Literal

import torch

from isthmus.platforms import rank_env
from isthmus.platforms.base import EnvDefaults, Platform
from isthmus.platforms.environment import MASKS
from isthmus.platforms.parts import Part, find_part
from isthmus.platforms.torch_features import SET_ALLOCATOR

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
LAZY_GLOO: EnvDefaults = {
    "TORCH_GLOO_LAZY_INIT": (
        "1",
        "groups on the host connect the ranks that exchange data; otherwise each rank needs a socket for every other",
    )
}


class GpuPlatform(Platform):
    """One GPU per rank, selected by local rank."""

    device_type: ClassVar[Literal["cpu", "cuda"]] = "cuda"
    collective_backend: ClassVar[Literal["gloo", "nccl"]] = "nccl"

    def peak_tflops(self, precision: str) -> float | None:
        """Peak without sparsity; fp32 without TF32, the default of torch."""
        part = self.part()
        return None if part is None else part.peak_tflops.get(precision)

    def part(self) -> Part | None:
        """The data sheet of the device; None if it is not in the table."""
        return find_part(self.properties().name)

    def default_precision(self) -> tuple[Literal["fp32", "bf16"], str]:
        supported, why = self.supports("bf16")
        return ("bf16" if supported else "fp32"), why

    def supports(self, capability: str) -> tuple[bool, str]:
        return self.arch_supports(self.arch(), capability)

    @classmethod
    def arch_supports(cls, arch: str, capability: str) -> tuple[bool, str]:
        """:meth:`supports` of any GPU of the vendor, such as ``sm_90``."""
        unit = {"fp32": "arithmetic", "blockwise": "FP8 kernels"}.get(capability, "matrix cores")
        supported = capability == "fp32" or cls._has_matrix_cores(arch, capability)
        return supported, f"{arch} has {'' if supported else 'no '}{capability} {unit}"

    def memory_gib(self) -> float:
        return float(torch.cuda.max_memory_reserved()) / 2**30

    def memory_used(self) -> float:
        free, total = torch.cuda.mem_get_info()
        return 1.0 - free / total

    def memory_retries(self) -> int:
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))

    def memory_for_rank_bytes(self, ranks_here: int = 1) -> int:
        return int(self.properties().total_memory)

    def device_count(self) -> int | None:
        return torch.cuda.device_count()

    def describe(self) -> str:
        properties = self.properties()
        return f"{self.device_count()} x {properties.name} ({self.arch()}, {properties.total_memory / 2**30:.0f} GiB)"

    def properties(self) -> Any:
        return torch.cuda.get_device_properties(self.device_index())

    def device_index(self) -> int:
        """The local rank; 0 if the batch system shows each rank only its own device."""
        return rank_env.local_rank() % max(1, torch.cuda.device_count())

    def device_id(self) -> str:
        properties = self.properties()
        uuid = str(getattr(properties, "uuid", ""))
        if not uuid.strip("0-"):  # some drivers report none
            return ""
        numbers = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
        masks = [os.environ.get(name) for name in MASKS]
        return f"{properties.name} {uuid}, PCI {numbers}, number {self.device_index()} of {masks}"

    def pci_address(self) -> str:
        """Such as ``0000:23:00.0``; empty if torch does not tell it."""
        properties = self.properties()
        numbers = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
        domain, bus, device = (-1 if number is None else int(number) for number in numbers)
        return "" if min(domain, bus, device) < 0 else f"{domain:04x}:{bus:02x}:{device:02x}.0"

    def prepare_process(self) -> tuple[str, ...]:
        return (self._set_up_allocator(),)

    def _set_up_allocator(self) -> str:
        """Use expandable memory segments, by torch's function: it reads variables only before the first device query.

        Returns what torch reports afterwards.
        """
        chosen = [f"{name}={os.environ[name]}" for name in _ALLOCATOR_VARIABLES if name in os.environ]
        expandable = not chosen and self.has_expandable_segments()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a build without expandable segments
            if expandable:
                SET_ALLOCATOR("expandable_segments:True")
            on = torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
        state = f"memory allocator: expandable segments {'on' if on else 'off'}"
        if chosen:
            return f"{state}; {', '.join(chosen)} is set"
        if not expandable:
            return f"{state}, as by default"
        why = "micro batches differ in length" if on else f"torch {torch.__version__} has none for this GPU"
        return f"{state}: {why}"

    def has_expandable_segments(self) -> bool:
        """Whether the vendor recommends expandable memory segments for this device."""
        return True

    @abstractmethod
    def arch(self) -> str:
        """Such as ``sm_90`` or ``gfx942``."""

    @staticmethod
    @abstractmethod
    def _has_matrix_cores(arch: str, capability: str) -> bool: ...
