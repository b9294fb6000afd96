"""NVIDIA GPUs with NCCL."""

from __future__ import annotations

from typing import ClassVar

from isthmus.platforms.base import EnvDefaults, RunShape
from isthmus.platforms.deterministic import CUDA_DEFAULTS
from isthmus.platforms.gpu import GpuPlatform

_SINCE = {"fp16": (7, 0), "bf16": (8, 0), "fp8": (8, 9)}
"""First compute capability with matrix cores, by precision."""


class CudaPlatform(GpuPlatform):
    name = "cuda"
    no_gemm_tuning = "with CUDA, PyTorch's TunableOp has no kernels beside the one that cuBLAS selects"
    env_defaults: ClassVar[EnvDefaults] = {}
    driver_files = ("/dev/nvidia-uvm",)
    # NVIDIA's data sheets, dense (their headline numbers count 2:4 sparsity double); SXM where no form is named.
    peaks = (
        ("GB200", {"bf16": 2500, "fp16": 2500, "fp8": 5000, "fp32": 80}),
        ("B200", {"bf16": 2250, "fp16": 2250, "fp8": 4500, "fp32": 75}),
        ("H[12]00 NVL", {"bf16": 835, "fp16": 835, "fp8": 1671, "fp32": 60}),
        ("H100 PCIe", {"bf16": 756, "fp16": 756, "fp8": 1513, "fp32": 51}),
        ("H100|G?H200", {"bf16": 989.4, "fp16": 989.4, "fp8": 1978.9, "fp32": 66.9}),
        ("A100", {"bf16": 312, "fp16": 312, "fp32": 19.5}),
        ("L40S", {"bf16": 362, "fp16": 362, "fp8": 733, "fp32": 91.6}),
    )

    def arch(self) -> str:
        properties = self.properties()
        return f"sm_{properties.major}{properties.minor}"

    def _has_matrix_cores(self, capability: str) -> bool:
        properties = self.properties()
        return capability in _SINCE and (properties.major, properties.minor) >= _SINCE[capability]

    def env_of_run(self, run: RunShape) -> EnvDefaults:
        chosen = dict(CUDA_DEFAULTS) if run.deterministic else {}
        if not run.fsdp and not run.async_tp:
            chosen["CUDA_DEVICE_MAX_CONNECTIONS"] = (
                "1",
                "kernels start in the order of their launch, which Megatron-Core's overlap of tensor-parallel "
                "communication with matmuls requires",
            )
        return chosen
