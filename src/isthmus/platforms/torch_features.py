"""Parts of torch that the oldest supported release (2.6) does not have, and what is used without them.

They are detected by name and not by version: vendors build development versions. ``docs/decisions/0028`` has the list.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPED_MM: Any = getattr(F, "grouped_mm", None)
"""Experts on a GPU; without it, one matmul per expert. Its private predecessor supports fewer GPUs."""

SCALED_MM: Any = getattr(F, "scaled_mm", None)
"""FP8 matmuls; without it, ``torch._scaled_mm``."""

SCALED_GROUPED_MM: Any = getattr(torch, "_scaled_grouped_mm", None)
"""FP8 matmuls of experts; without it, ``train.fp8_experts`` is refused. The public function has no shape checks for
traces without a GPU."""

ADDMM_INTO_FLOAT32: Any = getattr(torch.ops.aten.addmm, "dtype_out", None)
"""Adds a 16-bit matmul to a float32 tensor on a GPU. Releases before 2.10, and some builds for ROCm, have the name and
raise an error, so its first use is a trial; without it, the matmul is rounded to 16 bits and then added."""

FLOAT8_E8M0: torch.dtype | None = getattr(torch, "float8_e8m0fnu", None)
"""Without it, safetensors files with this dtype are refused."""

ONEDNN_MATMUL: Any = getattr(torch.backends.mkldnn, "matmul", None)
"""The setting that selects oneDNN for float32 matmuls on a CPU; without it, MKL."""

PACK_WEIGHT: Any = None
"""Copies a weight to the layout of oneDNN's kernels for a number of rows; without it, weights stay as they are."""
PACKED_LINEAR: Any = None
"""Multiplies by such a copy."""
with contextlib.suppress(AttributeError):
    if torch.backends.mkldnn.is_available():
        PACK_WEIGHT = torch.ops.mkldnn._reorder_linear_weight.default
        PACKED_LINEAR = torch.ops.mkldnn._linear_pointwise.default

CPU_CAPABILITIES: Callable[[], dict[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)
"""Instruction sets and name of the CPU; without it, bfloat16 is not known to be fast."""

SET_ALLOCATOR: Callable[[str], None] = (
    getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
)
"""Sets options of the GPU memory allocator, also after its first use; its predecessor is deprecated."""


def fsdp_sums_gradients() -> bool:
    """Whether ``fully_shard`` can sum gradients; without it, ``parallel.fsdp`` is refused."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_force_sum_reduction_for_comms")


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Flash attention over packed samples, with windows and grouped query heads.

    The operator that ``torch.nn.attention.varlen`` calls, without its wrapper in Python and the random state of a
    dropout that it does not have. What is activated in its place (FlashAttention 3) replaces the operator.
    """
    left, right = window_size
    results = torch.ops.aten._flash_attention_forward(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k),
        0.0,  # dropout
        window_size == (-1, 0),  # causal
        False,  # the mask for debugging
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    out: Tensor = results[0]
    return out


def symmetric_memory_ops() -> Any:
    """Operators on symmetric memory; without the module, ``parallel.async_tp`` is refused."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.distributed._symmetric_memory")  # defines them
    return torch.ops.symm_mem
