"""CPUs with the gloo backend."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any, ClassVar, Literal

import psutil
import torch

from isthmus.platforms.base import EnvDefaults, Platform
from isthmus.platforms.torch_features import CPU_CAPABILITIES

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_STATUS = Path("/proc/self/status")


class CpuPlatform(Platform):
    name: ClassVar[Literal["cpu", "cuda", "rocm"]] = "cpu"
    device_type: ClassVar[Literal["cpu", "cuda"]] = "cpu"
    collective_backend: ClassVar[Literal["gloo", "nccl"]] = "gloo"
    no_gemm_tuning: ClassVar[str | None] = "it tunes GEMMs of AMD GPUs; isthmus tune measures matmuls of a CPU"
    # The number of threads depends on the ranks and is set elsewhere.
    env_defaults: ClassVar[EnvDefaults] = {
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": (
            "64",
            "oneDNN keeps half a MiB for each shape of a bf16 matmul, and 1024 of them by default",
        )
    }

    def supports(self, capability: str) -> tuple[bool, str]:
        if capability == "fp32":
            return True, "every CPU has fp32"
        if capability == "bf16":
            unit = bf16_unit()
            return True, f"this CPU has {unit}" if unit else "without bf16 instructions, so slower than fp32"
        if capability == "fp16":
            capabilities = _cpu_capabilities()
            if capabilities.get("amx_fp16") or capabilities.get("avx512_fp16"):
                return True, "this CPU has fp16 instructions"
            return True, "without fp16 instructions, so slower than fp32"
        if capability == "fp8":
            return False, "CPUs have no fp8 matmuls; GPUs have from sm_89 on, or as gfx942, gfx950 and gfx12"
        return False, f"torch has no {capability} training on a CPU"

    def default_precision(self) -> tuple[Literal["fp32", "bf16"], str]:
        """fp32 on every CPU, so that runs are comparable."""
        unit = bf16_unit()
        hint = f"; this CPU has {unit}, so train.precision=bf16 may be faster" if unit else ""
        return "fp32", f"the default on every CPU{hint}"

    def peak_tflops(self, precision: str) -> float | None:
        """Unknown: it depends on clock rates that no interface reports."""
        return None

    def memory_gib(self) -> float:
        if _STATUS.exists():
            # Not getrusage: its maximum is inherited from the parent process.
            for line in _STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 2**20
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**30 if sys.platform == "darwin" else 2**20)

    def memory_used(self) -> float:
        memory = psutil.virtual_memory()
        return 1.0 - float(memory.available) / float(memory.total)

    def memory_for_rank_bytes(self, ranks_here: int = 1) -> int:
        return self.free_host_bytes() // ranks_here

    def device_count(self) -> int | None:
        return None

    def describe(self) -> str:
        name = _cpu_capabilities().get("cpu_name") or platform.machine()
        return f"{name}, {os.cpu_count()} logical cores"

    def prepare_process(self) -> tuple[str, ...]:
        matmuls = "fp32 matmuls: oneDNN if large and not in layers that ranks share; MKL has AVX-512 for Intel only"
        return tuple(filter(None, (_keep_freed_memory(), matmuls if onednn_is_faster() else None)))


def bf16_unit() -> str | None:
    """Name of this CPU's instructions for bfloat16 matmuls, or None."""
    capabilities = _cpu_capabilities()
    names = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "bf16": "Arm BF16"}
    return next((name for flag, name in names.items() if capabilities.get(flag)), None)


@functools.cache
def has_bf16_matmuls() -> bool:
    """Whether this CPU multiplies bfloat16 matrices faster than float32 ones."""
    return bf16_unit() is not None


def onednn_is_faster() -> bool:
    """Whether fp32 matmuls should use oneDNN instead of MKL; torch includes both.

    MKL has AVX-512 code for Intel processors only. Without AVX-512, torch's default is kept: not measured.
    """
    capabilities = _cpu_capabilities()
    intel = "Intel" in str(capabilities.get("cpu_name", "Intel"))
    return bool(capabilities.get("avx512_f")) and not intel and torch.backends.mkldnn.is_available()


def _keep_freed_memory() -> str | None:
    """Configure glibc to keep freed memory, since every step allocates the same gigabytes again.

    By default glibc returns tensors above 32 MiB to the system, and the kernel clears every page of the next one.
    Skipped if the user has set glibc's variables.
    """
    chosen = [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]
    if chosen:
        return f"memory allocator: unchanged, since {', '.join(sorted(chosen))} is set"
    if not platform.libc_ver()[0].startswith("glibc"):
        return None
    libc = ctypes.CDLL(None)
    if not (libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, -1)):
        return None
    pages = ", in huge pages" if _use_huge_pages(libc) else ""
    return f"memory allocator: freed memory is kept for the next step{pages}"


def _use_huge_pages(libc: ctypes.CDLL) -> bool:
    """Request huge pages for the heap: reserve its addresses with one large malloc, madvise, free.

    Only touched memory is used. If the system does not overcommit, malloc may fail, which has no effect.
    """
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.free.argtypes = [ctypes.c_void_p]
    page = mmap.PAGESIZE
    size = os.sysconf("SC_PHYS_PAGES") * page // 2
    address = libc.malloc(size)
    if not address:
        return False
    start = (address + page - 1) // page * page
    result = libc.madvise(start, (address + size - start) // page * page, mmap.MADV_HUGEPAGE)
    libc.free(address)
    return bool(result == 0)


def _cpu_capabilities() -> dict[str, Any]:
    return dict(CPU_CAPABILITIES())
