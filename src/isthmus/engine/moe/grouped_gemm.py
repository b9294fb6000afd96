"""Grouped GEMM for the experts of a rank.

A GPU uses PyTorch's ``grouped_mm``, which reads the group sizes from device memory. A CPU, and torch without the
function, runs one matmul per group.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isthmus.engine.layers.matmul import add_matmul
from isthmus.platforms.torch_features import GROUPED_MM

_ALIGNED_BYTES = 16
"""Row alignment that the kernel requires."""


def grouped_linear(x: Tensor, counts: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Multiply rows ``x`` [n, K], sorted by group, with the weight [N, K] of their group; returns [n, N].

    ``counts`` int64 [G] are the rows of each group. Weight gradients are added to ``main_grad`` if there is one.
    """
    return _GroupedLinear.apply(x, counts, *weights)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, counts)
        ctx.weights = weights  # not saved: a hook on saved tensors would return them without their main_grad
        return _grouped_matmul(x, counts, weights, transposed=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, counts), weights, grad = ctx.saved_tensors, ctx.weights, grads[0].contiguous()
        grad_x = _grouped_matmul(grad, counts, weights, transposed=False) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return grad_x, None, *[None] * len(weights)
        if getattr(weights[0], "main_grad", None) is None:
            made = [torch.zeros_like(weight) for weight in weights]
            _add_gradients(made, grad, x, counts)
            return grad_x, None, *made
        _add_gradients([weight.main_grad for weight in weights], grad, x, counts)
        for weight in weights:
            weight.grad_added_to_main_grad = True
        return grad_x, None, *[None] * len(weights)


def _grouped_matmul(x: Tensor, counts: Tensor, weights: Sequence[Tensor], *, transposed: bool) -> Tensor:
    if _has_kernel(x, weights[0]):
        stacked = stack_tensors(weights)
        offsets = counts.cumsum(0, dtype=torch.int32)
        return GROUPED_MM(x, stacked.mT if transposed else stacked, offs=offsets)
    sizes = counts.tolist()
    out = x.new_empty(x.size(0), weights[0].size(0 if transposed else 1))
    for part, weight, into in zip(x.split(sizes), weights, out.split(sizes), strict=True):
        if part.size(0):
            torch.mm(part, weight.t() if transposed else weight, out=into)
    return out


def _add_gradients(targets: Sequence[Tensor], grad: Tensor, x: Tensor, counts: Tensor) -> None:
    """``targets[g] += grad_g.T @ x_g`` for each group."""
    if _has_kernel(x, targets[0]):
        made = GROUPED_MM(grad.t(), x, offs=counts.cumsum(0, dtype=torch.int32))
        torch._foreach_add_(list(targets), list(made.unbind()))
        return
    sizes = counts.tolist()
    for target, grad_part, x_part in zip(targets, grad.split(sizes), x.split(sizes), strict=True):
        if x_part.size(0):
            add_matmul(target, grad_part.t(), x_part, shape_repeats=False)


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    return (
        GROUPED_MM is not None
        and x.is_cuda
        and x.size(0) > 0
        and x.dtype == torch.bfloat16
        and all(size * x.element_size() % _ALIGNED_BYTES == 0 for size in weight.shape)
    )


def stack_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Stack to [G, ...]: a view if the tensors have a constant stride in one storage, as in the DDP buffers."""
    first = tensors[0]
    starts = [tensor.data_ptr() for tensor in tensors]
    step, rest = divmod(starts[1] - starts[0] if len(starts) > 1 else first.nbytes, first.element_size())
    even = all(b - a == step * first.element_size() for a, b in itertools.pairwise(starts))
    storage = first.untyped_storage().data_ptr()
    together = all(tensor.untyped_storage().data_ptr() == storage for tensor in tensors)
    if even and together and not rest and step >= first.numel() and first.is_contiguous():
        return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))
    return torch.stack(list(tensors))
