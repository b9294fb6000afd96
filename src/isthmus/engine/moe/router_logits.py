"""The matmul of a router: float32 logits of 16-bit hidden states, of which no float32 copy is kept.

A product of two bfloat16 numbers is exact in float32, so a bfloat16 matmul with float32 sums gives the logits of a
float32 matmul, up to the order of the sums. The gradient of the logits is float32: three bfloat16 parts add up to it
exactly, and the matmuls of the parts add up to that of the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isthmus.engine.compiled import compiled_on_gpu
from isthmus.engine.linear.batch_invariant import uses_batch_invariant_matmuls
from isthmus.engine.linear.matmul import matmul, matmul_into_float32, no_float32_sums

_PARTS = 3


def router_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """``hidden @ weight.T`` in float32 [T, E], of [T, H] and [E, H]."""
    if hidden.dtype == torch.float32:
        return F.linear(hidden, weight.float())
    logits: Tensor = _RouterLogits.apply(hidden, weight)
    return logits


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.exact = _has_exact_matmul(hidden, weight)
        return matmul_into_float32(hidden, weight.t()) if ctx.exact else F.linear(hidden.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        gradients = _from_parts if ctx.exact else _in_float32
        return gradients(grads[0].contiguous(), hidden, weight, *ctx.needs_input_grad)


def _has_exact_matmul(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the GPU has the matmul; float16 has too few exponents for parts of a gradient."""
    if not hidden.is_cuda or uses_batch_invariant_matmuls():
        return False
    return hidden.dtype == weight.dtype == torch.bfloat16 and no_float32_sums(hidden.device, hidden.dtype) is None


def _in_float32(
    grad: Tensor, hidden: Tensor, weight: Tensor, needs_hidden: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    grad_hidden = (grad @ weight.float()).to(hidden.dtype) if needs_hidden else None
    return grad_hidden, (grad.t() @ hidden.float()).to(weight.dtype) if needs_weight else None


def _from_parts(
    grad: Tensor, hidden: Tensor, weight: Tensor, needs_hidden: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    parts = bfloat16_parts(grad).flatten(1)
    grad_hidden = matmul(parts, weight.repeat(_PARTS, 1)) if needs_hidden else None
    if not needs_weight:
        return grad_hidden, None
    products = matmul_into_float32(parts.t(), hidden)
    return grad_hidden, products.view(_PARTS, *weight.shape).sum(0).to(weight.dtype)


@compiled_on_gpu
def bfloat16_parts(x: Tensor) -> Tensor:
    """bfloat16 [T, 3, E] whose sum over the parts is ``x``, float32 [T, E]: 3 times 8 digits are its 24.

    The upper half of a float32 number is a bfloat16 number. A compiler removes a cast to bfloat16 and back, but not the
    mask.
    """
    parts = []
    for _ in range(_PARTS):
        part = (x.view(torch.int32) & -0x10000).view(torch.float32)
        parts.append(part)
        x = x - part
    return torch.stack(parts, 1).bfloat16()
