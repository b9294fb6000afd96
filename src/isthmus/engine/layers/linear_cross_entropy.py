"""The last projection and the cross entropy in one: vocabulary-parallel, chunked, gradient computed on the way.

Logits exist for one chunk of tokens at a time, in the model's dtype, and in float32 only for a block of its rows that
fits the cache. Only tokens that are learned are projected at all.

For a sum of losses the gradients of the hidden states and of the projection are taken while a chunk exists, so the
backward pass multiplies by a scalar and no logits are kept or computed twice. What is to become of each token's loss by
itself is not known then: those logits are computed again in the backward pass.
"""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.engine.layers.matmul import add_product, product

CHUNK_ELEMENTS = 1 << 25
"""Logits of a chunk. Larger chunks add to the projection's gradient less often; measured best on CPU."""
BLOCK_ELEMENTS = 1 << 20
"""Logits of a chunk that are float32 at a time: 4 MiB, which stay in the cache over the passes of a softmax."""


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab_start: int,
        num_rows: int,
        group: dist.ProcessGroup | None,
        softcap: float | None,
        grad_scale: Tensor | None,
        wants_grad: bool,
    ) -> Tensor:
        rows = weight[:num_rows]
        grad_hidden = torch.empty_like(hidden) if wants_grad else None
        into = getattr(weight, "main_grad", None)
        grad_weight = None
        if wants_grad and into is None:
            into = grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        loss_sum = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start, end in _chunks(hidden.size(0), num_rows):
            part = hidden[start:end]
            logits = product(part, rows.t(), out=_room(end - start, num_rows, like=hidden))
            slope = None if softcap is None else _cap(logits, softcap)
            loss_sum += _loss_and_gradient(logits, labels[start:end] - vocab_start, group, grad_scale).sum()
            if slope is not None:
                logits.mul_(slope)
            if grad_hidden is not None and into is not None:
                product(logits, rows, out=grad_hidden[start:end])
                add_product(into[:num_rows], logits.t(), part)
        ctx.weight, ctx.grad_scale = weight, grad_scale
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss_sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0] if ctx.grad_scale is None else grads[0] / ctx.grad_scale
        if grad_weight is not None:
            grad_weight = (grad_weight * scale).to(ctx.weight.dtype)
        else:
            told = "the projection's gradient was already taken, for a gradient of one times the loss scale"
            torch._assert_async(scale == 1, told)
            ctx.weight.grad_added_to_main_grad = True
        return grad_hidden * scale.to(grad_hidden.dtype), grad_weight, None, None, None, None, None, None, None


class _TokenCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab_start: int,
        num_rows: int,
        group: dist.ProcessGroup | None,
        softcap: float | None,
    ) -> Tensor:
        rows = weight[:num_rows]
        losses = torch.empty(hidden.size(0), dtype=torch.float32, device=hidden.device)
        for start, end in _chunks(hidden.size(0), num_rows):
            logits = product(hidden[start:end], rows.t(), out=_room(end - start, num_rows, like=hidden))
            if softcap is not None:
                _cap(logits, softcap)
            losses[start:end] = _loss_and_gradient(logits, labels[start:end] - vocab_start, group, None)
        ctx.weight = weight
        ctx.how = vocab_start, num_rows, group, softcap
        ctx.save_for_backward(hidden, weight, labels)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        vocab_start, num_rows, group, softcap = ctx.how
        rows, scale = weight[:num_rows], grads[0][:, None].contiguous()
        grad_hidden = torch.empty_like(hidden)
        into = getattr(ctx.weight, "main_grad", None)
        grad_weight = None
        if into is None:
            into = grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start, end in _chunks(hidden.size(0), num_rows):
            part = hidden[start:end]
            logits = product(part, rows.t(), out=_room(end - start, num_rows, like=hidden))
            slope = None if softcap is None else _cap(logits, softcap)
            _loss_and_gradient(logits, labels[start:end] - vocab_start, group, scale[start:end])
            if slope is not None:
                logits.mul_(slope)
            product(logits, rows, out=grad_hidden[start:end])
            add_product(into[:num_rows], logits.t(), part)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        else:
            ctx.weight.grad_added_to_main_grad = True
        return grad_hidden, grad_weight, None, None, None, None, None


def _cap(logits: Tensor, softcap: float) -> Tensor:
    """Overwrite ``logits`` with ``softcap * tanh(logits / softcap)`` and return the slope of that at each of them."""
    share = logits.div_(softcap).tanh_()
    slope = 1 - share.square()
    share.mul_(softcap)
    return slope


def _room(num_tokens: int, num_rows: int, *, like: Tensor) -> Tensor:
    """Memory for the logits of a chunk; on a CPU the same for every chunk, GPUs have an allocator for that."""
    if like.device.type != "cpu":
        return like.new_empty(num_tokens, num_rows)
    return _kept(max(CHUNK_ELEMENTS, num_rows), like.dtype)[: num_tokens * num_rows].view(num_tokens, num_rows)


@functools.lru_cache(maxsize=1)
def _kept(numel: int, dtype: torch.dtype) -> Tensor:
    """Memory outside the heap, which so large a hole would tear up; pages are taken when they are first written."""
    pages = mmap.mmap(-1, numel * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype)


def _chunks(num_tokens: int, num_rows: int) -> Iterator[tuple[int, int]]:
    """Start and end of chunks of about equal size, none with more than CHUNK_ELEMENTS logits."""
    most = max(1, CHUNK_ELEMENTS // max(1, num_rows))
    size = math.ceil(num_tokens / max(1, math.ceil(num_tokens / most)))
    for start in range(0, num_tokens, max(1, size)):
        yield start, min(start + size, num_tokens)


def _loss_and_gradient(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None, grad_scale: Tensor | None
) -> Tensor:
    """Overwrite ``logits`` with ``softmax(logits) - onehot(targets)`` and return the losses, float32 [n].

    Args:
        logits: [n, V / tp] of this rank's part of the vocabulary.
        targets: [n] index into this rank's part; outside of it on the ranks that do not hold the target.
        group: the tensor-parallel group, None for one rank.
        grad_scale: what the gradient is multiplied by, a scalar or [n, 1], in float32 and before it is rounded: that is
            what saves the small ones in float16.
    """
    block = max(1, BLOCK_ELEMENTS // max(1, logits.size(1)))
    mine = (targets >= 0) & (targets < logits.size(1))
    column = torch.where(mine, targets, 0)[:, None]
    target_logit = torch.where(mine[:, None], logits.gather(1, column).float(), 0.0)
    log_total = torch.empty_like(target_logit)
    in_float32 = logits.dtype == torch.float32
    scratch = None if in_float32 else logits.new_empty(min(block, logits.size(0)), logits.size(1), dtype=torch.float32)
    for start in range(0, logits.size(0), block):
        part = logits[start : start + block]
        wide = part if scratch is None else scratch[: part.size(0)].copy_(part)
        peak = wide.amax(dim=1, keepdim=True)
        torch.softmax(wide, dim=1, out=wide)
        # The largest probability is exp(peak - log_total), so one more look at it gives the sum in full precision.
        log_total[start : start + block] = peak - wide.amax(dim=1, keepdim=True).log()
        if grad_scale is not None:
            wide.mul_(grad_scale if grad_scale.dim() == 0 else grad_scale[start : start + block])
        if scratch is not None:
            part.copy_(wide)
    if group is not None:
        dist.all_reduce(target_logit, group=group)
        parts = log_total.new_empty(group.size() * log_total.numel())
        dist.all_gather_into_tensor(parts, log_total.flatten(), group=group)
        own, log_total = log_total, torch.logsumexp(parts.view(group.size(), -1), dim=0)[:, None]
        logits.mul_((own - log_total).exp_().to(logits.dtype))
    loss = log_total - target_logit
    # Where the target is another rank's, the probability at column 0 stays as it is.
    own_gradient = torch.expm1(-loss) if grad_scale is None else torch.expm1(-loss) * grad_scale
    at_target = torch.where(mine[:, None], own_gradient.to(logits.dtype), logits.gather(1, column))
    # Not scatter_, which on a CPU copies a bfloat16 tensor whole.
    logits[torch.arange(logits.size(0), device=logits.device), column[:, 0]] = at_target[:, 0]
    return loss[:, 0]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_start: int = 0,
    num_rows: int | None = None,
    group: dist.ProcessGroup | None = None,
    softcap: float | None = None,
    grad_scale: Tensor | None = None,
) -> Tensor:
    """Sum of the cross entropies of ``hidden @ weight.T`` against ``labels``, in float32.

    Args:
        hidden: [n, H] of the tokens that are learned, the same on every rank of ``group``.
        weight: [V / tp, H], this rank's rows of the projection. With a ``main_grad`` beside it, its gradient is added
            there straight away; else it reaches autograd.
        labels: int64 [n], indices into the whole vocabulary.
        vocab_start: index of the first row that this rank holds.
        num_rows: rows of ``weight`` that are vocabulary, the rest being padding; None means all.
        group: the tensor-parallel group, None for one rank.
        softcap: logits l become softcap * tanh(l / softcap).
        grad_scale: a scalar, the gradient that the loss will get (the loss scale of float16); None means one.

    Returns:
        A scalar, equal on every rank of ``group``. The gradient that reaches ``hidden`` is this rank's part:
        the caller sums it over the group.
    """
    rows = weight.size(0) if num_rows is None else num_rows
    # Asked here: inside a Function autograd is off, and needs_input_grad is true even under no_grad.
    wants_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    function: Any = _LinearCrossEntropy
    loss: Tensor = function.apply(
        hidden, weight, labels, vocab_start, rows, group, softcap, grad_scale if wants_grad else None, wants_grad
    )
    return loss


def token_cross_entropies(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_start: int = 0,
    num_rows: int | None = None,
    group: dist.ProcessGroup | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The cross entropy of each token, float32 [n], for losses that are more than their sum.

    Args and the gradient of ``hidden``: those of :func:`linear_cross_entropy`. A loss scale comes with the gradient,
    which is multiplied in float32.
    """
    rows = weight.size(0) if num_rows is None else num_rows
    function: Any = _TokenCrossEntropy
    losses: Tensor = function.apply(hidden, weight, labels, vocab_start, rows, group, softcap)
    return losses
