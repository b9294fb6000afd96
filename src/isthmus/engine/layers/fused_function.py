"""Elementwise functions of tensors in one compiled region each way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isthmus.engine.compiled import compiled_on_gpu, region_name

Function = Callable[..., Tensor]


def fused(function: Function) -> Function:
    """``function`` of tensors, of which only the inputs are saved: the backward pass computes it again.

    The first of them, and its gradient, have the length of the sequence as dimension 0. Integers have no gradients.
    """

    def call(*inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return fused_regions(function)[0](*inputs)
        return _FusedFunction.apply(function, *inputs)  # type: ignore[no-any-return]

    return call


@functools.cache  # for all layers
def fused_regions(function: Function) -> tuple[Function, Callable[..., tuple[Tensor | None, ...]]]:
    """The region of a function, and that of the gradients of its inputs, from the gradient of its result and them."""

    def gradients(grad: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        def of_floats(*floats: Tensor) -> Tensor:
            remaining = iter(floats)
            return function(*(next(remaining) if x.is_floating_point() else x for x in inputs))

        floats = [x for x in inputs if x.is_floating_point()]
        results = iter(torch.func.vjp(of_floats, *floats)[1](grad))
        return tuple(next(results) if x.is_floating_point() else None for x in inputs)

    return compiled_on_gpu(function), compiled_on_gpu(gradients, name=f"the gradient of {region_name(function)}")


class _FusedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Function, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        compute, ctx.compute_gradients = fused_regions(function)
        return compute(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.compute_gradients(grads[0], *ctx.saved_tensors)
