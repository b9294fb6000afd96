"""Matrix products, on a CPU by the faster of the two libraries that torch brings for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isthmus.platforms.cpu import onednn_is_faster


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of [..., K] and [K, N] of one dtype, as [..., N]; not to be differentiated."""
    linear = _onednn_linear() if a.device.type == "cpu" and a.dtype == torch.float32 and a.numel() else None
    return torch.matmul(a, b) if linear is None else linear(a, b.t(), None, "none", [], "")


@functools.cache
def _onednn_linear() -> Callable[..., Tensor] | None:
    """oneDNN's linear layer as torch's own compiler calls it; None where it gains nothing or this torch has none."""
    operators: Any = torch.ops.mkldnn
    return getattr(operators, "_linear_pointwise", None) if onednn_is_faster() else None
