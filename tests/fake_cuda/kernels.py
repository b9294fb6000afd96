"""Attention, which a CPU build decomposes for tensors on a GPU, and a GPU build runs as one kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_LIBRARY: list[Any] = []


def install() -> None:
    """Register it for autograd on ``cuda``, in front of the decomposition."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attention, "AutogradCUDA")
    _LIBRARY.append(library)  # its end would remove it


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """With torch's conditions of the flash and the memory-efficient kernel; cuDNN's is not chosen."""
    aten = torch.ops.aten
    grouped = query.size(-3) != key.size(-3)
    if query.dtype in (torch.bfloat16, torch.float16) and mask is None and query.size(-1) == value.size(-1) <= 256:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if not grouped:
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -math.inf)
        if mask is not None:
            mask = mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, query.requires_grad, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
