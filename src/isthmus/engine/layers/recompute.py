"""Recomputation of single results in the backward pass: norms, activations and rotary embeddings.

They are cheap to compute and large, and autograd saves them only as inputs of the next matmul or of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def recompute_if(
    condition: bool, results: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]
) -> AbstractContextManager[None]:
    """Where the block saves ``results`` for the backward pass, or views of them, it saves ``compute`` instead.

    ``compute`` returns them again, in the same order and memory layout; it runs once for all backward steps of the
    block, without gradients. Other hooks on saved tensors have no effect within the block.
    """
    if not (condition and torch.is_grad_enabled()):
        return _NOTHING
    saved = _Recomputed(results, compute)
    hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack)
    return hooks


_NOTHING = nullcontext()


class _Recomputed:
    def __init__(self, results: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> None:
        # The caller keeps the results, and so their addresses, until the end of the block.
        self.indices = {result.untyped_storage()._cdata: index for index, result in enumerate(results)}
        self.compute = compute
        self.results: Sequence[Tensor] | None = None
        self.num_saved = 0

    def pack(self, tensor: Tensor) -> Any:
        index = self.indices.get(tensor.untyped_storage()._cdata)
        if index is None:
            return tensor
        self.num_saved += 1
        return index, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self.results is None:
            with torch.no_grad():
                self.results = self.compute()
        index, *layout = packed
        tensor = self.results[index].as_strided(*layout)
        self.num_saved -= 1
        if self.num_saved <= 0:
            self.results = None
        return tensor


def recompute(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``compute(*inputs)``, of which only the inputs are saved; the backward pass computes it again.

    All tensors with a gradient are among the inputs, also parameters. ``compute`` draws no random numbers.
    """
    if not torch.is_grad_enabled():
        return compute(*inputs)
    return _RecomputedCall.apply(compute, *inputs)  # type: ignore[no-any-return]


class _RecomputedCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.compute = compute
        ctx.save_for_backward(*inputs)
        return compute(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            output = ctx.compute(*inputs)
        gradients = iter(torch.autograd.grad(output, [x for x in inputs if x.requires_grad], grads))
        return None, *(next(gradients) if need else None for need in needed)
