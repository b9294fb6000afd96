"""Fused output projection and cross entropy: vocabulary-parallel and chunked.

Logits exist for one chunk of tokens at a time, and in float32 only for a block of rows that fits the cache. For the
summed loss the forward pass computes the gradients and the backward pass scales them. For per-token losses the
backward pass recomputes the logits.
"""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.engine.layers.matmul import add_matmul, matmul

CHUNK_ELEMENTS = 1 << 25
"""Logits of a chunk; the fastest size on a CPU."""
BLOCK_ELEMENTS = 1 << 20
"""Float32 logits at a time: 4 MiB fit the cache."""


@dataclass(frozen=True, slots=True)
class VocabShard:
    start: int = 0
    """Vocabulary index of this rank's first row."""
    rows: int | None = None
    """Rows of the weight without padding; None means all."""
    group: dist.ProcessGroup | None = None
    """The tensor-parallel group, None for one rank."""
    softcap: float | None = None
    """Logits l become softcap * tanh(l / softcap)."""

    def chunk_losses(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        grad_scale: Tensor | None = None,
        grad_hidden: Tensor | None = None,
        grad_weight: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Yield the losses of each chunk of tokens.

        ``grad_scale`` is a scalar or [n, 1]. ``grad_hidden`` is overwritten, ``grad_weight`` is added to.
        """
        rows = weight[: self.rows]
        for start, end in _chunks(hidden.size(0), rows.size(0)):
            part = hidden[start:end]
            logits = matmul(part, rows.t(), out=_buffer(end - start, rows.size(0), like=hidden))
            slope = None if self.softcap is None else _cap(logits, self.softcap)
            scale = grad_scale if grad_scale is None or grad_scale.dim() == 0 else grad_scale[start:end]
            yield _loss_and_gradient(logits, labels[start:end] - self.start, self.group, scale)
            if grad_hidden is None or grad_weight is None:
                continue
            if slope is not None:
                logits.mul_(slope)
            matmul(logits, rows, out=grad_hidden[start:end])
            add_matmul(grad_weight[: self.rows], logits.t(), part)


_WHOLE = VocabShard()


def _new_grad(weight: Tensor) -> Tensor | None:
    if getattr(weight, "main_grad", None) is not None:
        return None
    return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sums the losses and computes the gradients in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        shard: VocabShard,
        grad_scale: Tensor | None,
        wants_grad: bool,
    ) -> Tensor:
        grads: dict[str, Any] = {}
        grad_hidden = grad_weight = None
        if wants_grad:
            grad_hidden, grad_weight = torch.empty_like(hidden), _new_grad(weight)
            into = weight.main_grad if grad_weight is None else grad_weight  # type: ignore[attr-defined]
            grads = {"grad_scale": grad_scale, "grad_hidden": grad_hidden, "grad_weight": into}
        loss_sum = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for losses in shard.chunk_losses(hidden, weight, labels, **grads):
            loss_sum += losses.sum()
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
            message = "the gradient was computed in the forward pass, for a loss gradient of 1 times the loss scale"
            torch._assert_async(scale == 1, message)
            ctx.weight.grad_added_to_main_grad = True
        return grad_hidden * scale.to(grad_hidden.dtype), grad_weight, None, None, None, None


class _TokenCrossEntropy(torch.autograd.Function):
    """Returns per-token losses; recomputes the logits in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard) -> Tensor:
        empty = torch.empty(0, dtype=torch.float32, device=hidden.device)
        ctx.weight, ctx.shard = weight, shard
        ctx.save_for_backward(hidden, weight, labels)
        return torch.cat([empty, *shard.chunk_losses(hidden, weight, labels)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), _new_grad(ctx.weight)
        into = ctx.weight.main_grad if grad_weight is None else grad_weight
        scale = grads[0][:, None].contiguous()
        for _ in ctx.shard.chunk_losses(
            hidden, weight, labels, grad_scale=scale, grad_hidden=grad_hidden, grad_weight=into
        ):
            pass
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        else:
            ctx.weight.grad_added_to_main_grad = True
        return grad_hidden, grad_weight, None, None


def _cap(logits: Tensor, softcap: float) -> Tensor:
    """Overwrite ``logits`` with ``softcap * tanh(logits / softcap)`` and return the derivative."""
    share = logits.div_(softcap).tanh_()
    slope = 1 - share.square()
    share.mul_(softcap)
    return slope


def _buffer(num_tokens: int, num_rows: int, *, like: Tensor) -> Tensor:
    """Memory for a chunk's logits; a CPU uses the same for every chunk."""
    if like.device.type != "cpu":
        return like.new_empty(num_tokens, num_rows)
    return _cpu_buffer(max(CHUNK_ELEMENTS, num_rows), like.dtype)[: num_tokens * num_rows].view(num_tokens, num_rows)


@functools.lru_cache(maxsize=1)
def _cpu_buffer(numel: int, dtype: torch.dtype) -> Tensor:
    """Anonymous mmap: it does not fragment the heap, and pages are allocated on first write."""
    pages = mmap.mmap(-1, numel * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype)


def _chunks(num_tokens: int, num_rows: int) -> Iterator[tuple[int, int]]:
    """Start and end of chunks of about equal size with at most CHUNK_ELEMENTS logits."""
    most = max(1, CHUNK_ELEMENTS // max(1, num_rows))
    size = math.ceil(num_tokens / max(1, math.ceil(num_tokens / most)))
    for start in range(0, num_tokens, max(1, size)):
        yield start, min(start + size, num_tokens)


def _loss_and_gradient(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None, grad_scale: Tensor | None
) -> Tensor:
    """Overwrite ``logits`` with ``softmax(logits) - onehot(targets)`` and return the losses, float32 [n].

    ``logits`` are [n, V / tp]; ``targets`` [n] index into this rank's shard, out of range for other ranks' targets.
    ``grad_scale``, a scalar or [n, 1], is applied in float32 so that small gradients do not underflow in float16.
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
        # The largest probability is exp(peak - log_total), which gives the sum in full precision.
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
    # For targets of other ranks the probability at column 0 does not change.
    own_gradient = torch.expm1(-loss) if grad_scale is None else torch.expm1(-loss) * grad_scale
    at_target = torch.where(mine[:, None], own_gradient.to(logits.dtype), logits.gather(1, column))
    # Not scatter_, which on a CPU copies a whole bfloat16 tensor.
    logits[torch.arange(logits.size(0), device=logits.device), column[:, 0]] = at_target[:, 0]
    return loss[:, 0]


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard = _WHOLE, *, grad_scale: Tensor | None = None
) -> Tensor:
    """Sum of the cross entropies of ``hidden @ weight.T`` against ``labels``, a float32 scalar, equal on every rank.

    Args:
        hidden: [n, H] of the loss tokens, equal on all tp ranks; its gradient has to be summed over tp.
        weight: [V / tp, H]; its gradient is added to ``main_grad`` in the forward pass, if it has one.
        labels: int64 [n], indices into the whole vocabulary.
        shard: the vocabulary rows of ``weight``.
        grad_scale: the scalar gradient of the loss (float16 loss scale); None means one.
    """
    # Check outside the Function, where autograd is off and needs_input_grad is true even under no_grad.
    wants_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(hidden, weight, labels, shard, grad_scale if wants_grad else None, wants_grad)


def token_cross_entropies(hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard = _WHOLE) -> Tensor:
    """Per-token losses, float32 [n]; otherwise like :func:`linear_cross_entropy`."""
    return _TokenCrossEntropy.apply(hidden, weight, labels, shard)
