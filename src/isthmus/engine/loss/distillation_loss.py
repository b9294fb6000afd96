"""Divergence of a student's logits from a teacher's, for a chunk of tokens, with its gradient in place of the logits.

For probabilities p of the student and t of the teacher at a temperature T, each divergence is a sum of terms f(p, t)
over the vocabulary. Its gradient in a logit is ``p (a - sum p a) / T`` for a = df/dp without constants:

- forward KL (beta 0): f = t log(t / p), a = -t / p
- reverse KL (beta 1): f = p log(p / t), a = log(p / t)
- generalized JSD, m = beta t + (1 - beta) p: f = beta t log(t / m) + (1 - beta) p log(p / m),
  a = (1 - beta) log(p / m)

With top k, the logarithms and fractions of the other tokens are those of their summed probabilities.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.config.schema.distillation import DistillConfig
from isthmus.engine.compiled import compiled_on_gpu
from isthmus.engine.loss import cross_entropy_cpu
from isthmus.engine.loss.cross_entropy_gpu import capped_logits

CHUNK_SHARE = 4
"""Chunks of a GPU are smaller than those of the cross entropy by this factor: there are two logits and more copies."""
TEMPORARY_BYTES = 44
"""Temporary memory for a logit if the kernels are not compiled."""
ABSENT = -1e4
"""The teacher's logit of a token that only the student's vocabulary has."""
_NORMS = 6


def chunk_losses(
    student: Tensor,
    teacher: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None,
    grad_scale: Tensor | None,
    softcap: float | None,
    settings: DistillConfig,
    *,
    gradient: bool,
) -> Tensor:
    """Loss, divergence and cross entropy of each token, float32 [n, 3]; the loss is their weighted sum.

    Args:
        student: [n, V / tp], with ``gradient`` overwritten by the gradient of the loss.
        teacher: [n, V / tp], of the same tokens, capped.
        targets, group, grad_scale, softcap: as for :func:`isthmus.engine.loss.cross_entropy_cpu.chunk_losses`;
            ``softcap`` is the student's.
    """
    form = (softcap, settings.temperature, settings.beta)
    size = cross_entropy_cpu.BLOCK_ELEMENTS // student.size(1) if student.device.type == "cpu" else student.size(0)
    blocks = [slice(start, start + max(1, size)) for start in range(0, student.size(0), max(1, size))]
    stats = [row_statistics(student[b], teacher[b], targets[b], *form[:2]) for b in blocks]
    norms = _over_ranks(torch.cat(stats), settings.temperature, group)
    if settings.top_k is not None:
        norms = torch.cat((norms, _kth_largest(teacher, settings.top_k, group)), 1)
        tails = torch.cat([tail_sums(student[b], teacher[b], norms[b], *form) for b in blocks])
        # The logarithm of a sum that underflows stays finite.
        norms = torch.cat((norms, _sum(tails, group).clamp_min(torch.finfo(tails.dtype).tiny).log()), 1)
    sums = _sum(torch.cat([divergence_sums(student[b], teacher[b], norms[b], *form) for b in blocks]), group)
    for b in blocks if gradient else ():
        scale = grad_scale if grad_scale is None or grad_scale.dim() == 0 else grad_scale[b]
        write_gradient(student[b], teacher[b], targets[b], norms[b], sums[b], scale, *form, settings.sft_weight)
    divergence, cross_entropy = sums[:, 0], norms[:, 0] + norms[:, 2] - norms[:, 3]
    return torch.stack((divergence + settings.sft_weight * cross_entropy, divergence, cross_entropy), 1)


@compiled_on_gpu
def row_statistics(
    student: Tensor, teacher: Tensor, targets: Tensor, softcap: float | None, temperature: float
) -> Tensor:
    """Float32 [n, 6]: student's largest logit, sum of exponentials relative to it at the temperature and at 1, and
    logit of the target (0 on other ranks); teacher's largest logit and sum at the temperature."""
    mine = (targets >= 0) & (targets < student.size(1))
    capped, _ = capped_logits(student, softcap)
    peak, teacher_peak = capped.amax(1, keepdim=True), teacher.float().amax(1, keepdim=True)
    total = ((capped - peak) / temperature).exp().sum(1)
    plain = total if temperature == 1 else (capped - peak).exp().sum(1)
    teacher_total = ((teacher.float() - teacher_peak) / temperature).exp().sum(1)
    label = capped.gather(1, targets.where(mine, 0)[:, None])[:, 0].where(mine, 0.0)
    return torch.stack((peak[:, 0], total, plain, label, teacher_peak[:, 0], teacher_total), 1)


def _over_ranks(stats: Tensor, temperature: float, group: dist.ProcessGroup | None) -> Tensor:
    """The statistics of all ranks' columns, with the logarithms of the sums, float32 [n, 6]."""
    parts = stats[None]
    if group is not None:
        parts = stats.new_empty(group.size(), *stats.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), stats, group=group)
    peaks, totals, plains, labels, teacher_peaks, teacher_totals = parts.unbind(2)
    peak, teacher_peak = peaks.amax(0), teacher_peaks.amax(0)
    total = (((peaks - peak) / temperature).exp() * totals).sum(0).log()
    plain = ((peaks - peak).exp() * plains).sum(0).log()
    teacher_total = (((teacher_peaks - teacher_peak) / temperature).exp() * teacher_totals).sum(0).log()
    return torch.stack((peak, total, plain, labels.sum(0), teacher_peak, teacher_total), 1)


def _kth_largest(teacher: Tensor, k: int, group: dist.ProcessGroup | None) -> Tensor:
    """The k-th largest logit of each row, float32 [n, 1]; -inf if the vocabulary has fewer tokens."""
    largest = teacher.topk(min(k, teacher.size(1)), sorted=False).values.float()
    largest = torch.nn.functional.pad(largest, (0, k - largest.size(1)), value=-math.inf)
    if group is not None:
        gathered = largest.new_empty(group.size(), *largest.shape)
        dist.all_gather_into_tensor(gathered.flatten(0, 1), largest, group=group)
        largest = gathered.movedim(0, 1).flatten(1)
    return largest.topk(k).values[:, -1:]


def _sum(sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums


@compiled_on_gpu
def tail_sums(
    student: Tensor, teacher: Tensor, norms: Tensor, softcap: float | None, temperature: float, beta: float
) -> Tensor:
    """Student's and teacher's probability of the tokens below the k-th largest logit of ``norms``, float32 [n, 2]."""
    _, _, log_p, log_t = _log_probs(student, teacher, norms, softcap, temperature)
    rest = teacher.float() < norms[:, _NORMS, None]
    return torch.stack([x.exp().where(rest, 0.0).sum(1) for x in (log_p, log_t)], 1)


@compiled_on_gpu
def divergence_sums(
    student: Tensor, teacher: Tensor, norms: Tensor, softcap: float | None, temperature: float, beta: float
) -> Tensor:
    """Sums of f and of p a over the columns, float32 [n, 2]."""
    _, _, log_p, log_t = _log_probs(student, teacher, norms, softcap, temperature)
    terms, weighted = _terms(teacher, log_p, log_t, norms, beta)
    return torch.stack((terms.sum(1), weighted.sum(1)), 1)


@compiled_on_gpu
def write_gradient(
    student: Tensor,
    teacher: Tensor,
    targets: Tensor,
    norms: Tensor,
    sums: Tensor,
    grad_scale: Tensor | None,
    softcap: float | None,
    temperature: float,
    beta: float,
    sft_weight: float,
) -> None:
    """Overwrite ``student`` with the scaled gradient; ``sums`` are those of :func:`divergence_sums` over all ranks."""
    capped, slope, log_p, log_t = _log_probs(student, teacher, norms, softcap, temperature)
    _, weighted = _terms(teacher, log_p, log_t, norms, beta)
    gradient = (weighted - log_p.exp() * sums[:, 1:]) / temperature
    if sft_weight:
        label = torch.arange(student.size(1), device=student.device) == targets[:, None]
        gradient = gradient + sft_weight * ((capped - norms[:, :1] - norms[:, 2:3]).exp() - label.float())
    if slope is not None:
        gradient = gradient * slope
    student.copy_(gradient if grad_scale is None else gradient * grad_scale)


def _log_probs(
    student: Tensor, teacher: Tensor, norms: Tensor, softcap: float | None, temperature: float
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Capped logits and their derivative, log-probabilities of student and teacher; float32."""
    peak, total, _, _, teacher_peak, teacher_total = norms[:, :_NORMS, None].unbind(1)
    capped, slope = capped_logits(student, softcap)
    log_p = (capped - peak) / temperature - total
    return capped, slope, log_p, (teacher.float() - teacher_peak) / temperature - teacher_total


def _terms(teacher: Tensor, log_p: Tensor, log_t: Tensor, norms: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """f and p a of each column."""
    p, t = log_p, log_t  # of the token, or of all tokens outside of the top k
    if norms.size(1) > _NORMS:
        kth, rest_p, rest_t = norms[:, _NORMS:, None].unbind(1)
        is_kept = teacher.float() >= kth
        p, t = log_p.where(is_kept, rest_p), log_t.where(is_kept, rest_t)
    if beta == 0:
        return log_t.exp() * (t - p), -(log_p - p + t).exp()
    if beta == 1:
        weighted = log_p.exp() * (p - t)
        return weighted, weighted
    mixture = torch.logaddexp(p + math.log1p(-beta), t + math.log(beta))
    weighted = (1 - beta) * log_p.exp() * (p - mixture)
    return beta * log_t.exp() * (t - mixture) + weighted, weighted
