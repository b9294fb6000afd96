"""Cross entropy of a chunk of logits on a GPU: statistics of each row, then the gradient in place of the logits.

Each part is compiled and reads the logits once; ranks exchange the statistics between them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.engine.compiled import compiled_on_gpu
from isthmus.engine.loss.cross_entropy_cpu import Smoothing

CHUNK_ELEMENTS = 1 << 28
"""Logits of a chunk: the weight gradient is read and written once a chunk, so chunks are large."""
TEMPORARY_BYTES = 8
"""Temporary memory for a logit if the kernels are not compiled; with a softcap, twice as much."""
_MEMORY_SHARE = 1 / 16
_ROW_ALIGNMENT = 64
"""Rows of logits start at multiples of it, as fast GEMM kernels require for any vocabulary size."""


def chunk_elements(device: torch.device) -> int:
    """Logits of a chunk on this GPU."""
    return elements_for(torch.cuda.get_device_properties(device).total_memory)


def elements_for(memory_bytes: int) -> int:
    """Logits of a chunk with this memory: a power of two, because ranks on GPUs of about equal memory must agree."""
    affordable = int(memory_bytes * _MEMORY_SHARE) // (2 + TEMPORARY_BYTES)
    return min(CHUNK_ELEMENTS, 1 << max(20, affordable.bit_length() - 1))


def new_buffer(num_tokens: int, num_rows: int, *, like: Tensor) -> Tensor:
    """Memory for the logits [num_tokens, num_rows] of a chunk."""
    width = -(-num_rows // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    return like.new_empty(num_tokens, width)[:, :num_rows]


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
    """Losses, float32 [n]; with ``gradient`` they also overwrite ``logits`` with their gradient.

    The arguments are those of :func:`isthmus.engine.loss.cross_entropy_cpu.chunk_losses`.
    """
    stats, column = row_statistics(logits, targets, softcap, smoothing is not None)
    parts = stats[:, None]
    if group is not None:
        gathered = stats.new_empty(group.size() * stats.size(0), stats.size(1))
        dist.all_gather_into_tensor(gathered, stats, group=group)
        parts = gathered.unflatten(0, (group.size(), -1)).movedim(0, 1)
    if not gradient:
        return losses(parts, smoothing)
    results, at_target = losses_and_gradient(logits, targets, parts, grad_scale, softcap, smoothing)
    logits.scatter_(1, column, at_target)
    return results


@compiled_on_gpu
def row_statistics(
    logits: Tensor, targets: Tensor, softcap: float | None, with_sum: bool = False
) -> tuple[Tensor, Tensor]:
    """Largest logit, sum of exponentials relative to it and logit of the target, float32 [n, 3]; and target columns.

    ``with_sum`` adds the sum of the logits, float32 [n, 4].
    For a target of another rank, its logit is 0 and its column is 0; columns are int64 [n, 1].
    """
    mine, column = _own_columns(logits, targets)
    capped, _ = capped_logits(logits, softcap)
    # In this form the compiler reads the logits once for both.
    peak = capped.amax(dim=1, keepdim=True)
    total = (capped - peak).exp_().sum(dim=1, keepdim=True)
    target = capped_logits(logits.gather(1, column), softcap)[0].where(mine, 0.0)
    results = (peak, total, target, capped.sum(dim=1, keepdim=True)) if with_sum else (peak, total, target)
    return torch.cat(results, 1), column


@compiled_on_gpu
def losses(parts: Tensor, smoothing: Smoothing | None) -> Tensor:
    """Losses [n] from the statistics [n, ranks, 3], or with ``smoothing`` [n, ranks, 4]."""
    return _smoothed(_loss_and_total(parts)[0], parts, smoothing)


@compiled_on_gpu
def losses_and_gradient(
    logits: Tensor,
    targets: Tensor,
    parts: Tensor,
    grad_scale: Tensor | None,
    softcap: float | None,
    smoothing: Smoothing | None,
) -> tuple[Tensor, Tensor]:
    """Overwrite ``logits`` with the scaled probabilities; returns losses [n] and gradients [n, 1] at the targets.

    The gradient at the target is computed from its loss, because a probability close to one minus one is inaccurate.
    """
    mine, column = _own_columns(logits, targets)
    loss, peak, total = _loss_and_total(parts)
    scale = torch.ones_like(total)[:, None] if grad_scale is None else grad_scale
    factor = scale / total[:, None]
    target, target_slope = capped_logits(logits.gather(1, column), softcap)
    # For a target of another rank the gradient in column 0 does not change.
    other = (target - peak[:, None]).exp_() * factor
    capped, slope = capped_logits(logits, softcap)
    gradient = (capped - peak[:, None]).exp_().mul_(factor)
    at_label = torch.expm1(-loss)[:, None]
    if smoothing is not None:
        at_label = at_label + (smoothing.rate - smoothing.share)
        other, gradient = other - smoothing.share * scale, gradient - smoothing.share * scale
    at_target = (at_label * scale).where(mine, other)
    if slope is not None and target_slope is not None:
        gradient.mul_(slope)
        at_target = at_target * target_slope
    logits.copy_(gradient)
    return _smoothed(loss, parts, smoothing), at_target.to(logits.dtype)


def _own_columns(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Whether this rank has the target [n, 1], and its column or 0 [n, 1]."""
    mine = ((targets >= 0) & (targets < logits.size(1)))[:, None]
    return mine, targets[:, None].where(mine, 0)


def _loss_and_total(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, largest logits and sums of exponentials of all ranks' columns, [n] each."""
    peaks, totals, targets = parts[..., :3].unbind(2)
    peak = peaks.amax(1)
    total = ((peaks - peak[:, None]).exp_() * totals).sum(1)
    return total.log() + (peak - targets.sum(1)), peak, total


def _smoothed(loss: Tensor, parts: Tensor, smoothing: Smoothing | None) -> Tensor:
    if smoothing is None:
        return loss
    return loss + smoothing.rate * parts[..., 2].sum(1) - smoothing.share * parts[..., 3].sum(1)


def capped_logits(logits: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Capped logits in float32, and their derivative."""
    if softcap is None:
        return logits.float(), None
    share = (logits.float() / softcap).tanh_()
    return share * softcap, 1 - share.square()
