"""NVIDIA GPUs with NCCL."""

from __future__ import annotations

from typing import ClassVar, Literal

from isthmus.platforms.base import EnvDefaults, RunShape
from isthmus.platforms.deterministic import CUDA_DEFAULTS
from isthmus.platforms.gpu import LAZY_GLOO, GpuPlatform
from isthmus.platforms.gpu_sensors import GpuSensors, nvidia_sensors

_SINCE = {"fp16": (7, 0), "bf16": (8, 0), "fp8": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""First compute capability with matrix cores, by precision."""
_LAST = {"blockwise": (9, 0)}
"""Last one with a kernel: that of blockwise FP8 is cuBLAS's for Hopper. Its successors scale blocks of MXFP8."""


class CudaPlatform(GpuPlatform):
    name: ClassVar[Literal["cpu", "cuda", "rocm"]] = "cuda"
    no_gemm_tuning: ClassVar[str | None] = (
        "with CUDA, PyTorch's TunableOp has no kernels beside the one that cuBLAS selects; isthmus tune compares it "
        "with cuBLASLt"
    )
    env_defaults: ClassVar[EnvDefaults] = LAZY_GLOO
    driver_files: ClassVar[tuple[str, ...]] = ("/dev/nvidia-uvm",)
    swizzled_mx_scales: ClassVar[bool] = True

    def arch(self) -> str:
        properties = self.properties()
        return f"sm_{properties.major}{properties.minor}"

    @staticmethod
    def _has_matrix_cores(arch: str, capability: str) -> bool:
        number = arch.removeprefix("sm_")
        version = int(number[:-1]), int(number[-1])
        return capability in _SINCE and _SINCE[capability] <= version <= _LAST.get(capability, version)

    def env_of_run(self, run: RunShape) -> EnvDefaults:
        chosen = dict(CUDA_DEFAULTS) if run.deterministic else {}
        if run.tp_or_cp and not run.fsdp and not run.async_tp:
            chosen["CUDA_DEVICE_MAX_CONNECTIONS"] = (
                "1",
                "kernels start in the order of their launch, which the overlap of tensor-parallel communication "
                "with matmuls requires",
            )
        return chosen

    def sensors(self) -> GpuSensors | None:
        return nvidia_sensors(self.pci_address(), str(getattr(self.properties(), "uuid", "")))
