"""CPUs, with gloo between the ranks."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from isthmus.platforms.base import EnvDefaults, Platform
from isthmus.platforms.free_memory import free_bytes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_STATUS = Path("/proc/self/status")


class CpuPlatform(Platform):
    """The CPUs of this machine."""

    name = "cpu"
    device_type = "cpu"
    collective_backend = "gloo"

    def supports(self, capability: str) -> tuple[bool, str]:
        """See :meth:`Platform.supports`. bf16 is always right on a CPU; only some have instructions for it."""
        if capability == "fp32":
            return True, "every CPU has fp32"
        if capability == "bf16":
            unit = self._bf16_unit()
            return True, f"this CPU has {unit}" if unit else "without bf16 instructions, so slower than fp32"
        if capability == "fp16":
            facts = _facts()
            quick = facts.get("amx_fp16") or facts.get("avx512_fp16")
            return (
                True,
                f"this CPU has {'' if quick else 'no '}instructions for it{'' if quick else ': slower than fp32'}",
            )
        if capability == "fp8":
            return False, "CPUs have no fp8 matrix products; GPUs have from sm_89 on, or as gfx942, gfx950 and gfx12"
        return False, f"torch has no {capability} training on a CPU"

    def default_precision(self) -> tuple[Literal["fp32", "bf16"], str]:
        """See :meth:`Platform.default_precision`. The same on every CPU, so that runs can be compared."""
        unit = self._bf16_unit()
        hint = f"; this CPU has {unit}, so train.precision=bf16 may be faster" if unit else ""
        return "fp32", f"the default on every CPU{hint}"

    def peak_tflops(self, precision: str) -> float | None:
        """Not known: it depends on clocks that no interface tells."""
        return None

    def memory_gib(self) -> float:
        """See :meth:`Platform.memory_gib`."""
        if _STATUS.exists():
            # Not getrusage: its maximum is inherited from the process that started this one.
            for line in _STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 2**20
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**30 if sys.platform == "darwin" else 2**20)

    def memory_used(self) -> float:
        """See :meth:`Platform.memory_used`."""
        return 1.0 - free_bytes() / int(psutil.virtual_memory().total)

    def memory_for_rank_bytes(self, ranks_here: int = 1) -> int:
        """See :meth:`Platform.memory_for_rank_bytes`."""
        return free_bytes() // ranks_here

    def device_count(self) -> int | None:
        """See :meth:`Platform.device_count`."""
        return None

    def describe(self) -> str:
        """See :meth:`Platform.describe`."""
        name = _facts().get("cpu_name") or platform.processor() or platform.machine()
        return f"{name}, {os.cpu_count()} logical cores"

    def env_defaults(self) -> EnvDefaults:
        """See :meth:`Platform.env_defaults`. The number of threads depends on the ranks, and is the run's to set."""
        few = "oneDNN keeps half a MiB for each shape of a bf16 product, and 1024 of them by default"
        return {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": ("64", few)}

    def prepare_process(self) -> tuple[str, ...]:
        """See :meth:`Platform.prepare_process`."""
        where = "where they are large and ranks share no layer; MKL has AVX-512 code for Intel's CPUs alone"
        products = f"products in fp32: oneDNN's, {where}"
        return tuple(filter(None, (_keep_memory(), products if onednn_is_faster() else None)))

    def _bf16_unit(self) -> str | None:
        """The instructions this CPU has for bf16 matrix products, by name."""
        facts = _facts()
        named = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "bf16": "Arm BF16"}
        return next((name for flag, name in named.items() if facts.get(flag)), None)


def onednn_is_faster() -> bool:
    """Whether float32 products should come from oneDNN and not from MKL, of which torch brings both.

    MKL has AVX-512 code for Intel's processors alone. Without AVX-512 nothing was measured, and torch's choice stays.
    """
    facts = _facts()
    intel = "Intel" in str(facts.get("cpu_name", "Intel"))
    return bool(facts.get("avx512_f")) and not intel and torch.backends.mkldnn.is_available()


def _keep_memory() -> str | None:
    """Let the C library keep what is freed: a step asks for the same gigabytes again and again.

    glibc hands tensors beyond 32 MiB back to the system at once, which then clears every page of the next one. Who has
    set glibc's own variables has chosen.
    """
    chosen = [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]
    if chosen:
        return f"memory allocator: left as {', '.join(sorted(chosen))} says"
    if not platform.libc_ver()[0].startswith("glibc"):
        return None
    libc = ctypes.CDLL(None)
    if not (libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, -1)):
        return None
    return f"memory allocator: freed memory is kept for the next step{_huge_pages(libc)}"


def _huge_pages(libc: ctypes.CDLL) -> str:
    """Ask for huge pages under the heap that is yet to grow; returns what was reached, for the user.

    The heap's addresses are claimed by one large allocation, marked and given back; memory is used only as it is
    touched. A system that promises no more than it has may refuse, and then nothing has happened.
    """
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.free.argtypes = [ctypes.c_void_p]
    page = mmap.PAGESIZE
    size = os.sysconf("SC_PHYS_PAGES") * page // 2
    address = libc.malloc(size)
    if not address:
        return ""
    start = (address + page - 1) // page * page
    taken = libc.madvise(start, (address + size - start) // page * page, mmap.MADV_HUGEPAGE) == 0
    libc.free(address)
    return ", in huge pages" if taken else ""


def _facts() -> dict[str, Any]:
    """What torch knows of the CPU; nothing where this torch cannot tell."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    return dict(ask()) if ask else {}
