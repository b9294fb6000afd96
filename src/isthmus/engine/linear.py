"""Tensor-parallel linear layers that add their weight gradient straight into the gradient buffer.

Megatron-Core has this fusion only as a CUDA extension of Apex. In float32 a plain ``addmm_`` does the same on
every device: one matrix product with the accumulation inside, instead of a product, an allocation and an addition.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel import layers as mcore
from torch import Tensor

from isthmus.engine.main_grad import add_product


class _LinearIntoMainGrad(torch.autograd.Function):
    """``x @ weight.T``, whose weight gradient goes to ``weight.main_grad`` and not to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # not saved: a hook on saved tensors would hand it back without its main_grad
        return torch.matmul(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        grad_x = grads[0].matmul(weight)
        add_product(weight.main_grad, grads[0].flatten(0, -2).t(), x.flatten(0, -2))
        weight.grad_added_to_main_grad = True
        return grad_x, None


def _fusible(weight: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether nothing but the product is asked for: no bias, no communication around it, gradients in float32."""
    main_grad = getattr(weight, "main_grad", None)
    return (
        main_grad is not None
        and torch.is_grad_enabled()
        and main_grad.dtype == torch.float32
        and kwargs["bias"] is None
        and not kwargs["allreduce_dgrad"]
        and not kwargs["sequence_parallel"]
    )


class ColumnParallelLinear(mcore.ColumnParallelLinear):
    """Megatron-Core's column-parallel linear layer, with the accumulation fused where it can be."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        if _fusible(weight, kwargs):
            return _LinearIntoMainGrad.apply(input, weight)
        return super()._forward_impl(input, weight, **kwargs)


class RowParallelLinear(mcore.RowParallelLinear):
    """Megatron-Core's row-parallel linear layer, with the accumulation fused where it can be."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        if _fusible(weight, kwargs):
            return _LinearIntoMainGrad.apply(input, weight)
        return super()._forward_impl(input, weight, **kwargs)


@functools.cache
def with_bias(kind: type, bias: bool) -> type:
    """The same layer with a bias or without, whatever it is asked for: Megatron-Core has one switch for several."""

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs | {"bias": bias})  # type: ignore[misc]

    return type(kind.__name__, (kind,), {"__init__": build, "__doc__": kind.__doc__})
