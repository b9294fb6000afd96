"""AMD GPUs with RCCL."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from isthmus.platforms.base import EnvDefaults, RunShape
from isthmus.platforms.deterministic import ROCM_DEFAULTS
from isthmus.platforms.gpu import LAZY_GLOO, GpuPlatform
from isthmus.platforms.gpu_sensors import GpuSensors, amd_sensors

_16_BIT = ("gfx908", "gfx90a", "gfx942", "gfx950", "gfx11", "gfx12")
"""CDNA 1, 2, 3, 4; RDNA 3, 3.5 and 4."""
_MATRIX_CORES = {"bf16": _16_BIT, "fp16": _16_BIT, "fp8": ("gfx942", "gfx950", "gfx12"), "mxfp8": ("gfx950",)}


class RocmPlatform(GpuPlatform):
    name: ClassVar[Literal["cpu", "cuda", "rocm"]] = "rocm"
    no_gemm_tuning: ClassVar[str | None] = None
    env_defaults: ClassVar[EnvDefaults] = {
        **LAZY_GLOO,
        "HSA_NO_SCRATCH_RECLAIM": (
            "1",
            "kernels keep their scratch memory, so that no step waits for its reallocation",
        ),
        "GPU_MAX_HW_QUEUES": (
            "2",
            "one queue for computation and one for communication overlap well; more queues contend",
        ),
        "HSA_ENABLE_SDMA": ("1", "copies use the copy engines and leave the compute units free"),
        "TORCH_NCCL_HIGH_PRIORITY": ("1", "communication kernels are not queued behind matmuls"),
    }
    driver_files: ClassVar[tuple[str, ...]] = ("/dev/kfd",)

    def arch(self) -> str:
        return str(self.properties().gcnArchName).partition(":")[0]

    @staticmethod
    def _has_matrix_cores(arch: str, capability: str) -> bool:
        return arch.startswith(_MATRIX_CORES.get(capability, ()))

    def fp8_types(self) -> tuple[torch.dtype, torch.dtype]:
        """CDNA 3 has the fnuz dtypes, which predate the OCP standard: one zero, no infinities, another bias."""
        if self.arch().startswith("gfx942"):
            return torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
        return super().fp8_types()

    def env_of_run(self, run: RunShape) -> EnvDefaults:
        chosen = dict(ROCM_DEFAULTS) if run.deterministic else {}
        if run.tp_or_cp and not run.fsdp and not run.async_tp:
            chosen["CUDA_DEVICE_MAX_CONNECTIONS"] = ("1", "Megatron-Core warns without it; HIP itself does not read it")
        if run.gemm_tuning_file is not None:
            chosen |= {
                "PYTORCH_TUNABLEOP_ENABLED": ("1", "train.gemm_tuning: GEMMs use the fastest kernel in the file"),
                "PYTORCH_TUNABLEOP_TUNING": (
                    "1",
                    "train.gemm_tuning: each new GEMM shape is measured once",
                ),
                "PYTORCH_TUNABLEOP_FILENAME": (run.gemm_tuning_file, "the next start reads the results"),
            }
        if run.nodes > 1:
            chosen |= {
                "NCCL_CROSS_NIC": ("0", "a ring uses one network card of each node, as rails are wired"),
                "NCCL_PXN_DISABLE": ("1", "no buffers for another GPU's network card; AMD's recommendation"),
                "NCCL_P2P_NET_CHUNKSIZE": ("524288", "larger chunks between nodes for pipelines; AMD's recommendation"),
            }
        return chosen

    def env_of_device(self) -> EnvDefaults:
        return {"RCCL_WARP_SPEED_AUTO": ("0", "AMD's setting for the MI350 series")} if self.arch() == "gfx950" else {}

    def has_expandable_segments(self) -> bool:
        return self.arch() in ("gfx942", "gfx950")

    def sensors(self) -> GpuSensors | None:
        return amd_sensors(self.pci_address())
