"""The interface of a platform: the rest of the program asks for capabilities, never for a vendor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

EnvDefaults = Mapping[str, tuple[str, str]]
"""Environment variables: value and the reason for it."""


@dataclass(frozen=True, slots=True)
class RunShape:
    """Properties of a run that some environment variables depend on."""

    nodes: int = 1
    fsdp: bool = False
    tp_or_cp: bool = False
    """Whether ranks communicate within a layer."""


@dataclass(frozen=True)
class Platform(ABC):
    """One kind of hardware as this process sees it.

    The constructor does not query the hardware: runtimes read their environment variables at the first query, so
    :func:`isthmus.platforms.environment.apply_env` must come before it.
    """

    reason: str
    """Why this platform was chosen, for the log."""

    name: ClassVar[Literal["cpu", "cuda", "rocm"]]
    device_type: ClassVar[Literal["cpu", "cuda"]]
    """The device type in torch, "cuda" for ROCm too."""
    collective_backend: ClassVar[Literal["gloo", "nccl"]]
    """The backend of torch.distributed, "nccl" for RCCL too."""

    @abstractmethod
    def supports(self, capability: str) -> tuple[bool, str]:
        """Whether the hardware supports a precision (``fp32``, ``bf16``, ``fp16``, ``fp8``), and the reason."""

    def fp8_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of e4m3 and e5m2 on hardware with ``fp8``."""
        return torch.float8_e4m3fn, torch.float8_e5m2

    @abstractmethod
    def default_precision(self) -> tuple[Literal["fp32", "bf16"], str]:
        """The default training precision, and the reason."""

    @abstractmethod
    def peak_tflops(self, precision: str) -> float | None:
        """The vendor's peak of one device for dense matmuls, in 10^12 FLOP/s; None if unknown."""

    @abstractmethod
    def memory_gib(self) -> float:
        """Peak memory of this process so far in GiB (2^30 bytes): of its device, on a CPU of the machine.

        On a device it is the memory reserved by torch's caching allocator.
        """

    @abstractmethod
    def memory_used(self) -> float:
        """Share of the device's memory (on a CPU: the machine's) in use by all processes, 0..1."""

    @abstractmethod
    def memory_for_rank_bytes(self, ranks_here: int = 1) -> int:
        """Memory of one rank: all of its device, or its share of the machine's free memory among ``ranks_here``."""

    @abstractmethod
    def device_count(self) -> int | None:
        """Devices of this machine, one for each rank; None on a CPU, which any number of ranks share."""

    @abstractmethod
    def describe(self) -> str:
        """The hardware in a few words."""

    @abstractmethod
    def env_defaults(self) -> EnvDefaults:
        """Environment variables of the platform for every run."""

    def env_of_run(self, run: RunShape) -> EnvDefaults:
        """Environment variables for a run of this shape on these devices."""
        return {}

    def prepare_process(self) -> tuple[str, ...]:
        """Set up this process for training, before a model is built; returns log lines."""
        return ()

    @property
    def env_aliases(self) -> Mapping[str, tuple[str, ...]]:
        """Other names of the variables; a user who has set one of them has chosen."""
        return {}
