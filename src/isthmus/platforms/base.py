"""The interface of a platform. Other modules query capabilities, never the vendor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:  # isthmus doctor --quick does not import it
    import torch

from isthmus.platforms.free_memory import free_bytes
from isthmus.platforms.gpu_sensors import GpuSensors

EnvDefaults = Mapping[str, tuple[str, str]]
"""Value of each environment variable, and the reason."""


@dataclass(frozen=True, slots=True)
class RunShape:
    nodes: int = 1
    fsdp: bool = False
    tp_or_cp: bool = False
    """Whether ranks communicate within a layer."""
    async_tp: bool = False
    """Whether copies between GPUs overlap matmuls on several streams."""
    gemm_tuning_file: str | None = None
    """File of this rank for the GEMM kernels that ``train.gemm_tuning`` selects; None: no tuning."""
    deterministic: bool = False


@dataclass(frozen=True)
class Platform(ABC):
    """One kind of hardware as this process sees it.

    Constructor, ``env_defaults`` and ``env_of_run`` do not query the hardware: runtimes read their environment
    variables at the first query, so ``apply_env`` must come first.
    """

    reason: str
    """Reason for the choice of this platform, for the log."""

    name: ClassVar[Literal["cpu", "cuda", "rocm"]]
    device_type: ClassVar[Literal["cpu", "cuda"]]
    """``cuda`` for ROCm too."""
    collective_backend: ClassVar[Literal["gloo", "nccl"]]
    """``nccl`` for RCCL too."""
    env_defaults: ClassVar[EnvDefaults]
    """Environment variables that do not depend on the run."""
    no_gemm_tuning: ClassVar[str | None]
    """Why ``train.gemm_tuning`` has no effect; None: it has."""
    driver_files: ClassVar[tuple[str, ...]] = ()
    """Device files that the runtime of the platform opens at its first use."""
    swizzled_mx_scales: ClassVar[bool] = False
    """Whether kernels read the e8m0 scales of MXFP8 in tiles of 128 x 4, instead of row by row."""

    @abstractmethod
    def supports(self, capability: str) -> tuple[bool, str]:
        """Whether the hardware supports a precision, and the reason.

        Precisions are ``fp32``, ``bf16``, ``fp16``, ``fp8``, and ``blockwise`` and ``mxfp8``, scalings of ``fp8``.
        """

    def fp8_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The e4m3 and e5m2 dtypes."""
        import torch

        return torch.float8_e4m3fn, torch.float8_e5m2

    @abstractmethod
    def default_precision(self) -> tuple[Literal["fp32", "bf16"], str]:
        """Training precision, and the reason."""

    @abstractmethod
    def peak_tflops(self, precision: str) -> float | None:
        """Peak of one device for dense matmuls, in TFLOP/s; None if unknown."""

    @abstractmethod
    def memory_gib(self) -> float:
        """Peak memory of this process in GiB: reserved by the CUDA caching allocator, or resident on a CPU."""

    @abstractmethod
    def memory_used(self) -> float:
        """Share of the memory of the device (on a CPU: of the machine) in use by all processes, 0..1."""

    def memory_retries(self) -> int:
        """How often the allocator found the device full, returned unused memory and tried again; 0 on a CPU."""
        return 0

    @abstractmethod
    def memory_for_rank_bytes(self, ranks_here: int = 1) -> int:
        """Memory of the rank's device; on a CPU, free memory divided by ``ranks_here``."""

    def free_host_bytes(self) -> int:
        """Free memory of the machine outside of its GPUs."""
        return free_bytes()

    @abstractmethod
    def device_count(self) -> int | None:
        """Devices of this machine; None on a CPU, which any number of ranks share."""

    @abstractmethod
    def describe(self) -> str:
        """Name and size of the hardware, for the log."""

    def device_index(self) -> int:
        """Number of this rank's device among those that this process sees."""
        return 0

    def device_id(self) -> str:
        """Identifies this rank's device on its machine; empty if unknown, and on a CPU, which ranks share."""
        return ""

    def sensors(self) -> GpuSensors | None:
        """Sensors of this rank's GPU; None on a CPU, or without the library of the vendor."""
        return None

    def env_of_run(self, run: RunShape) -> EnvDefaults:
        return {}

    def env_of_device(self) -> EnvDefaults:
        """Queries the hardware, so only for variables that are read later."""
        return {}

    def prepare_process(self) -> tuple[str, ...]:
        """Set up this process before a model is built; returns log lines."""
        return ()
