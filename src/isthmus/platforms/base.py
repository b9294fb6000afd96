"""What the rest of the program may ask of the machine. It asks for capabilities and never for a vendor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

EnvDefaults = Mapping[str, tuple[str, str]]
"""Environment variables with the value that is meant for them and the reason."""


@dataclass(frozen=True, slots=True)
class RunShape:
    """What the choice of some variables hangs on."""

    nodes: int = 1
    fsdp: bool = False
    tp_or_cp: bool = False
    """Whether ranks exchange activations within a layer."""


@dataclass(frozen=True)
class Platform(ABC):
    """One kind of hardware as this process sees it.

    Making one asks nothing of the hardware: the runtimes read their environment variables at the first question,
    which must therefore not come before :func:`isthmus.platforms.environment.apply_env`.
    """

    reason: str
    """Why this platform was taken, for the user."""

    name: ClassVar[Literal["cpu", "cuda", "rocm"]]
    device_type: ClassVar[Literal["cpu", "cuda"]]
    """What torch calls its devices; ROCm's torch answers to "cuda"."""
    collective_backend: ClassVar[Literal["gloo", "nccl"]]
    """What torch.distributed calls its collectives; ROCm's RCCL answers to "nccl"."""

    @abstractmethod
    def supports(self, capability: str) -> tuple[bool, str]:
        """Whether the hardware can do something, and why (not).

        Args:
            capability: a precision: ``fp32``, ``bf16``, ``fp16`` or ``fp8``. Anything else is not supported.
        """

    def fp8_types(self) -> tuple[torch.dtype, torch.dtype]:
        """What the hardware takes for e4m3 and for e5m2, where it supports ``fp8``."""
        return torch.float8_e4m3fn, torch.float8_e5m2

    @abstractmethod
    def default_precision(self) -> tuple[Literal["fp32", "bf16"], str]:
        """The precision to train in when the user names none, and why."""

    @abstractmethod
    def peak_tflops(self, precision: str) -> float | None:
        """The vendor's peak of one device for dense matrix products, in 10^12 FLOP/s; None where it is not known."""

    @abstractmethod
    def memory_gib(self) -> float:
        """Most memory that this process has held so far: of its device, or of the machine on a CPU. GiB = 2^30 bytes.

        On a device it is what torch's allocator has taken, which includes what it keeps for reuse.
        """

    @abstractmethod
    def memory_used(self) -> float:
        """Share of the device's memory that is taken now, by whomever, 0..1; on a CPU of the machine's."""

    @abstractmethod
    def memory_for_rank_bytes(self, ranks_here: int = 1) -> int:
        """Memory that a rank may count on: all of its device, or its share of what this machine has left.

        Args:
            ranks_here: ranks on this machine.
        """

    @abstractmethod
    def device_count(self) -> int | None:
        """Devices that this machine's ranks have, one for each; None where any number of ranks share what there is."""

    @abstractmethod
    def describe(self) -> str:
        """The hardware in a few words."""

    @abstractmethod
    def env_defaults(self) -> EnvDefaults:
        """Environment variables that suit the platform whatever the run."""

    def env_of_run(self, run: RunShape) -> EnvDefaults:
        """Those that suit this run on these devices."""
        return {}

    def prepare_process(self) -> tuple[str, ...]:
        """Set this process up for training, before it builds a model; returns what was done and why, for the user."""
        return ()

    @property
    def env_aliases(self) -> Mapping[str, tuple[str, ...]]:
        """Other names of variables in :meth:`env_defaults`: who has set one of them has chosen."""
        return {}
