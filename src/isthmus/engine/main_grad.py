"""Adding a weight's gradient to the float32 buffer that the optimizer reads."""

from __future__ import annotations

from torch import Tensor

BLOCK_ELEMENTS = 1 << 20
"""What a bfloat16 product yields at a time on a CPU: 2 MiB, still in the cache when it is added to float32."""


def add_product(main_grad: Tensor, a: Tensor, b: Tensor) -> None:
    """``main_grad += a @ b`` for ``a`` [M, K] and ``b`` [K, N]; in one operation where their dtypes allow it.

    PyTorch has no product of bfloat16 added into float32. On a CPU the product is taken in blocks of rows, so that no
    tensor of the weight's size is written and read again.
    """
    if a.dtype == main_grad.dtype:
        main_grad.addmm_(a, b)
        return
    rows = max(1, BLOCK_ELEMENTS // b.size(1)) if a.device.type == "cpu" else a.size(0)
    for into, part in zip(main_grad.split(rows), a.split(rows), strict=True):
        into.add_(part @ b)
