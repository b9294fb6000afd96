"""Matrix products, on a CPU by the faster of the two libraries that torch brings for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isthmus.platforms.cpu import onednn_is_faster

BLOCK_ELEMENTS = 1 << 20
"""Of a result that is copied to where it is wanted: 4 MiB, which are still in the cache."""


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``a @ b`` of [..., K] and [K, N], as [..., N]; not to be differentiated.

    Args:
        a: with ``out`` given, [m, K].
        b: of the same dtype.
        out: [m, N], where the result is to lie.
    """
    linear = _onednn_linear() if a.device.type == "cpu" and a.dtype == torch.float32 and a.numel() else None
    if linear is None:
        return torch.matmul(a, b, out=out)
    if out is None:
        return linear(a, b.t(), None, "none", [], "")
    columns = max(1, BLOCK_ELEMENTS // a.size(0))
    for into, part in zip(out.split(columns, dim=1), b.split(columns, dim=1), strict=True):
        into.copy_(linear(a, part.t(), None, "none", [], ""))
    return out


@functools.cache
def _onednn_linear() -> Callable[..., Tensor] | None:
    """oneDNN's linear layer as torch's own compiler calls it; None where it gains nothing or this torch has none."""
    operators: Any = torch.ops.mkldnn
    return getattr(operators, "_linear_pointwise", None) if onednn_is_faster() else None
