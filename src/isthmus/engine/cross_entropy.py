"""The last projection and the cross entropy in one: vocabulary-parallel, chunked, gradient computed on the way.

Logits exist for one chunk of tokens at a time. While they do, the gradients of the hidden states and of the
projection are taken too, so the backward pass multiplies by a scalar and no logits are kept or computed twice.
Only tokens that are learned are projected at all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 23
"""Logits per chunk: 32 MiB in float32, small enough to stay near the cache, large enough for full matrix speed."""


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, vocab_start: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        wants_grad = any(ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if wants_grad else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wants_grad else None
        loss_sum = torch.zeros((), dtype=torch.float32, device=hidden.device)
        chunk = max(1, CHUNK_ELEMENTS // weight.size(0))
        for start in range(0, hidden.size(0), chunk):
            rows = slice(start, start + chunk)
            probabilities, loss = _softmax_and_loss(hidden[rows] @ weight.t(), labels[rows] - vocab_start, group)
            loss_sum += loss
            if grad_hidden is not None and grad_weight is not None:
                grad_logits = probabilities.to(weight.dtype)
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
                if weight.dtype == torch.float32:
                    grad_weight.addmm_(grad_logits.t(), hidden[rows])
                else:
                    grad_weight.add_(grad_logits.t() @ hidden[rows])
        ctx.save_for_backward(*(() if grad_hidden is None else (grad_hidden, grad_weight)))
        return loss_sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0].to(grad_hidden.dtype), grad_weight.mul_(grads[0]), None, None, None


def _softmax_and_loss(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """``softmax(logits) - onehot(targets)`` of this rank's part of the vocabulary, and the summed loss of all of it.

    Args:
        logits: [n, V / tp], overwritten.
        targets: [n] index into this rank's part; outside of it on the ranks that do not hold the target.
        group: the tensor-parallel group, None for one rank.
    """
    logits = logits.float()
    log_total = torch.logsumexp(logits, dim=-1)
    if group is not None:
        parts = log_total.new_empty(group.size() * log_total.numel())
        dist.all_gather_into_tensor(parts, log_total, group=group)
        log_total = torch.logsumexp(parts.view(group.size(), -1), dim=0)
    mine = (targets >= 0) & (targets < logits.size(1))
    column = torch.where(mine, targets, 0)[:, None]
    target_logit = torch.where(mine, logits.gather(1, column)[:, 0], 0.0)
    if group is not None:
        dist.all_reduce(target_logit, group=group)
    probabilities = logits.sub_(log_total[:, None]).exp_()
    probabilities.scatter_add_(1, column, -mine.to(probabilities.dtype)[:, None])
    return probabilities, (log_total - target_logit).sum()


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, vocab_start: int, group: dist.ProcessGroup | None
) -> Tensor:
    """Sum of the cross entropies of ``hidden @ weight.T`` against ``labels``, in float32.

    Args:
        hidden: [n, H] of the tokens that are learned, the same on every rank of ``group``.
        weight: [V / tp, H], this rank's rows of the projection, without padding rows.
        labels: int64 [n], indices into the whole vocabulary.
        vocab_start: index of the first row that this rank holds.
        group: the tensor-parallel group, None for one rank.

    Returns:
        A scalar, equal on every rank of ``group``. The gradient that reaches ``hidden`` is this rank's part:
        the caller sums it over the group.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, vocab_start, group)
