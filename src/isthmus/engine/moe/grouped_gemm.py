"""Grouped GEMM for the experts of a rank.

PyTorch's ``grouped_mm`` reads the group sizes from device memory; a loop runs one matmul per group and needs the sizes
on the host. A CPU uses the loop, a GPU the faster of both (:mod:`isthmus.engine.moe.gemm_choice`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from isthmus.engine.host_copies import HostCopy
from isthmus.engine.linear.batch_invariant import uses_batch_invariant_matmuls
from isthmus.engine.linear.matmul import add_matmul
from isthmus.engine.linear.quantized_weight import dense
from isthmus.platforms.torch_features import GROUPED_MM

_ALIGNED_BYTES = 16
"""Row alignment that the kernel requires."""


class GroupSizes:
    """The number of rows of each group, for all GEMMs of a layer."""

    def __init__(self, counts: Tensor, on_host: list[int] | None = None) -> None:
        """``counts`` int64 [G]; ``on_host`` are the same numbers if the host has them."""
        self.counts = counts
        self._on_host = on_host
        self._copy: HostCopy | None = None

    @functools.cached_property
    def ends(self) -> Tensor:
        """int32 [G], the end of each group's rows."""
        return self.counts.cumsum(0, dtype=torch.int32)

    def copy_to_host(self) -> None:
        """Start the copy that :attr:`on_host` waits for."""
        if self._on_host is None and self._copy is None:
            self._copy = HostCopy(self.counts)

    @property
    def on_host(self) -> list[int]:
        self.copy_to_host()
        if self._copy is not None and self._on_host is None:
            self._on_host = self._copy.read().tolist()
        assert self._on_host is not None
        return self._on_host


@dataclass(frozen=True, slots=True)
class GemmKernels:
    """The GEMMs of the experts that use ``grouped_mm`` where it supports the tensors; the others are loops."""

    matmul: bool = True
    """The forward pass and the gradient of its input."""
    weight_gradient: bool = True


class GroupedMatmul(Protocol):
    """The signature of :func:`grouped_matmul`."""

    def __call__(
        self, x: Tensor, sizes: GroupSizes, weights: Sequence[Tensor], *, transposed: bool, kernel: bool
    ) -> Tensor: ...


def grouped_linear(
    x: Tensor,
    sizes: GroupSizes,
    weights: Sequence[Tensor],
    kernels: GemmKernels = GemmKernels(),
    multiply: GroupedMatmul | None = None,
) -> Tensor:
    """Multiply rows ``x`` [n, K], sorted by group, with the weight [N, K] of their group; returns [n, N].

    ``multiply`` computes it and the gradient of ``x``, by default :func:`grouped_matmul`. Weight gradients are added to
    ``main_grad`` if there is one.
    """
    return _GroupedLinear.apply(x, sizes, kernels, multiply or grouped_matmul, *weights)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sizes: GroupSizes, kernels: GemmKernels, multiply: GroupedMatmul, *weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x if any(ctx.needs_input_grad[4:]) else None)
        ctx.multiply = multiply
        ctx.weights = weights  # not saved: a hook on saved tensors would return them without their main_grad
        supported = _has_kernel(x, weights[0])
        ctx.sizes, ctx.matmul = sizes, supported and kernels.matmul
        ctx.weight_gradient = supported and kernels.weight_gradient
        if not ctx.weight_gradient and any(ctx.needs_input_grad[4:]):
            sizes.copy_to_host()  # arrives before the backward pass needs it
        return multiply(x, sizes, weights, transposed=True, kernel=ctx.matmul)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), sizes, weights, grad = ctx.saved_tensors, ctx.sizes, ctx.weights, grads[0].contiguous()
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.multiply(grad, sizes, weights, transposed=False, kernel=ctx.matmul)
        if not any(ctx.needs_input_grad[4:]):
            return grad_x, None, None, None, *[None] * len(weights)
        trained = [weight if weight.requires_grad else None for weight in weights]
        if all(getattr(weight, "main_grad", None) is None for weight in weights):
            gradients = [weight if weight is None else torch.zeros_like(weight) for weight in trained]
            add_gradients(gradients, grad, x, sizes, kernel=ctx.weight_gradient)
            return grad_x, None, None, None, *gradients
        into = [weight if weight is None else weight.main_grad for weight in trained]
        add_gradients(into, grad, x, sizes, kernel=ctx.weight_gradient)
        for weight in weights:
            weight.grad_added_to_main_grad = weight.requires_grad
        return grad_x, None, None, None, *[None] * len(weights)


def grouped_matmul(
    x: Tensor, sizes: GroupSizes, weights: Sequence[Tensor], *, transposed: bool, kernel: bool
) -> Tensor:
    """``x_g @ weight_g`` for each group, or ``x_g @ weight_g.T`` if ``transposed``; ``kernel`` means ``grouped_mm``.

    The kernel needs all weights de-quantized at the same time, the loop one.
    """
    if kernel:
        stacked = stack_tensors([dense(weight) for weight in weights])
        return GROUPED_MM(x, stacked.mT if transposed else stacked, offs=sizes.ends)
    rows = sizes.on_host
    out = x.new_empty(x.size(0), weights[0].size(0 if transposed else 1))
    for part, weight, into in zip(x.split(rows), weights, out.split(rows), strict=True):
        if part.size(0):
            torch.mm(part, dense(weight).t() if transposed else dense(weight), out=into)
    return out


def add_gradients(
    targets: Sequence[Tensor | None], grad: Tensor, x: Tensor, sizes: GroupSizes, *, kernel: bool
) -> None:
    """``targets[g] += grad_g.T @ x_g`` for each group with a target.

    ``grouped_mm`` cannot add, and rounds the product to the dtype of ``x``; the loop adds to float32.
    """
    if kernel:
        gradients = GROUPED_MM(grad.t(), x, offs=sizes.ends)
        # One addition: _foreach_add_ of 16-bit to float32 tensors starts a kernel for each.
        present = [target for target in targets if target is not None]
        together = stacked_view(present) if len(present) == len(targets) else None
        if together is not None:
            together.add_(gradients)
            return
        for target, gradient in zip(targets, gradients.unbind(), strict=True):
            if target is not None:
                target.add_(gradient)
        return
    rows = sizes.on_host
    for target, grad_part, x_part in zip(targets, grad.split(rows), x.split(rows), strict=True):
        if x_part.size(0) and target is not None:
            add_matmul(target, grad_part.t(), x_part, shape_repeats=False)


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    if uses_batch_invariant_matmuls():
        return False
    return x.is_cuda and x.size(0) > 0 and unsupported_reason(weight.shape, x.dtype) is None


def unsupported_reason(shape: Sequence[int], dtype: torch.dtype) -> str | None:
    """Why ``grouped_mm`` has no kernel on a GPU for weights [N, K] and rows of a dtype; None if it may have one."""
    if GROUPED_MM is None:
        return f"torch {torch.__version__} has no grouped_mm"
    if dtype != torch.bfloat16:
        return f"grouped_mm has kernels for bfloat16, not for {str(dtype).removeprefix('torch.')}"
    if any(size * dtype.itemsize % _ALIGNED_BYTES for size in shape):
        return f"grouped_mm needs rows of a multiple of {_ALIGNED_BYTES} bytes, not {' x '.join(map(str, shape))}"
    return None


def stack_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Stack to [G, ...]: a view where :func:`stacked_view` has one, as in the DDP buffers, else a copy."""
    view = stacked_view(tensors)
    return torch.stack(list(tensors)) if view is None else view


def stacked_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """A view [G, ...] of tensors that have a constant stride in one storage; None if they do not."""
    first = tensors[0]
    starts = [tensor.data_ptr() for tensor in tensors]
    step, rest = divmod(starts[1] - starts[0] if len(starts) > 1 else first.nbytes, first.element_size())
    even = all(b - a == step * first.element_size() for a, b in itertools.pairwise(starts))
    storage = first.untyped_storage().data_ptr()
    together = all(tensor.untyped_storage().data_ptr() == storage for tensor in tensors)
    if even and together and not rest and step >= first.numel() and first.is_contiguous():
        return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))
    return None
