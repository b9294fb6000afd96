"""Cross entropy of a chunk of logits on a CPU: float32 values exist for a block of rows that fits the cache."""

from __future__ import annotations

import functools
import mmap
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 25
"""Logits of a chunk; the fastest size."""
BLOCK_ELEMENTS = 1 << 20
"""Float32 logits at a time: 4 MiB fit the cache."""


class Smoothing(NamedTuple):
    """Label smoothing as in ``torch.nn.functional.cross_entropy``."""

    rate: float
    """Weight of the mean loss over the vocabulary; that of the label is 1 - rate."""
    share: float
    """``rate`` divided by the size of the vocabulary."""


def chunk_elements(_device: torch.device) -> int:
    return CHUNK_ELEMENTS


def new_buffer(num_tokens: int, num_rows: int, *, like: Tensor) -> Tensor:
    """Memory for the logits [num_tokens, num_rows] of a chunk, the same at every call."""
    return _memory(max(CHUNK_ELEMENTS, num_rows), like.dtype)[: num_tokens * num_rows].view(num_tokens, num_rows)


@functools.lru_cache(maxsize=1)
def _memory(numel: int, dtype: torch.dtype) -> Tensor:
    """Anonymous mmap: it does not fragment the heap, and pages are allocated on first write."""
    pages = mmap.mmap(-1, numel * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    with torch.inference_mode(False):  # training uses it too
        return torch.frombuffer(pages, dtype=dtype)


def chunk_losses(
    logits: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None,
    grad_scale: Tensor | None,
    softcap: float | None,
    *,
    gradient: bool,
    smoothing: Smoothing | None = None,
) -> Tensor:
    """Losses, float32 [n]; ``logits`` are overwritten, with ``gradient`` by the gradient.

    Args:
        logits: [n, V / tp].
        targets: [n], index into this rank's shard, out of range for other ranks' targets.
        group: the tensor-parallel group.
        grad_scale: a scalar or [n, 1], applied in float32 so that small gradients do not underflow in float16.
        softcap: logits l become softcap * tanh(l / softcap).
    """
    slope = None if softcap is None else _cap(logits, softcap)
    results = _loss_and_gradient(logits, targets, group, grad_scale, smoothing, gradient=gradient)
    if gradient and slope is not None:
        logits.mul_(slope)
    return results


def _cap(logits: Tensor, softcap: float) -> Tensor:
    """Overwrite ``logits`` with ``softcap * tanh(logits / softcap)`` and return the derivative."""
    share = logits.div_(softcap).tanh_()
    slope = 1 - share.square()
    share.mul_(softcap)
    return slope


def _loss_and_gradient(
    logits: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None,
    grad_scale: Tensor | None,
    smoothing: Smoothing | None,
    *,
    gradient: bool,
) -> Tensor:
    """Overwrite ``logits`` and return the losses [n].

    With ``gradient``, ``logits`` become ``softmax(logits) - onehot(targets)``, scaled.
    """
    block = max(1, BLOCK_ELEMENTS // max(1, logits.size(1)))
    if group is None:
        mine, column = None, targets[:, None]
        target_logit = logits.gather(1, column).float()
    else:
        mine = ((targets >= 0) & (targets < logits.size(1)))[:, None]
        column = torch.where(mine, targets[:, None], 0)
        target_logit = torch.where(mine, logits.gather(1, column).float(), 0.0)
    log_total, logit_sum = torch.empty_like(target_logit), torch.empty_like(target_logit)
    in_float32 = logits.dtype == torch.float32
    scratch = None if in_float32 else logits.new_empty(min(block, logits.size(0)), logits.size(1), dtype=torch.float32)
    for start in range(0, logits.size(0), block):
        part = logits[start : start + block]
        wide = part if scratch is None else scratch[: part.size(0)].copy_(part)
        peak = wide.amax(dim=1, keepdim=True)
        if smoothing is not None:
            torch.sum(wide, 1, keepdim=True, out=logit_sum[start : start + block])
        torch.softmax(wide, dim=1, out=wide)
        # The largest probability is exp(peak - log_total), which gives the sum in full precision.
        log_total[start : start + block] = peak - wide.amax(dim=1, keepdim=True).log()
        if gradient and grad_scale is not None:
            wide.mul_(grad_scale if grad_scale.dim() == 0 else grad_scale[start : start + block])
        if gradient and scratch is not None:
            part.copy_(wide)
    if group is not None:
        dist.all_reduce(target_logit, group=group)
        if smoothing is not None:
            dist.all_reduce(logit_sum, group=group)
        parts = log_total.new_empty(group.size() * log_total.numel())
        dist.all_gather_into_tensor(parts, log_total.flatten(), group=group)
        rank_total, log_total = log_total, torch.logsumexp(parts.view(group.size(), -1), dim=0)[:, None]
        if gradient:
            logits.mul_((rank_total - log_total).exp_().to(logits.dtype))
    cross_entropy = log_total - target_logit
    loss = cross_entropy
    if smoothing is not None:
        loss = loss + smoothing.rate * target_logit - smoothing.share * logit_sum
    if not gradient:
        return loss[:, 0]
    target_gradient = torch.expm1(-cross_entropy)
    if smoothing is not None:
        target_gradient += smoothing.rate - smoothing.share
        logits.sub_(smoothing.share if grad_scale is None else smoothing.share * grad_scale)
    if grad_scale is not None:
        target_gradient *= grad_scale
    at_target = target_gradient.to(logits.dtype)
    if mine is not None:  # for targets of other ranks the gradient at column 0 does not change
        at_target = torch.where(mine, at_target, logits.gather(1, column))
    # Not scatter_, which on a CPU copies a whole bfloat16 tensor.
    logits[torch.arange(logits.size(0), device=logits.device), column[:, 0]] = at_target[:, 0]
    return loss[:, 0]
