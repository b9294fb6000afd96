"""Cross entropies and entropies of tokens at a temperature, with the fused and chunked output projection.

For probabilities p over the vocabulary, the entropy is ``H = -sum p log p``, and its gradient in a logit is
``-p (log p + H)``. The backward pass recomputes the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.engine.compiled import compiled_on_gpu
from isthmus.engine.loss import cross_entropy_cpu
from isthmus.engine.loss.cross_entropy_gpu import capped_logits
from isthmus.engine.loss.linear_cross_entropy import ALL_ROWS, Gradients, VocabShard, device_code, recomputed_gradients


def policy_values(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    shard: VocabShard = ALL_ROWS,
    *,
    entropy_gradient: bool = False,
) -> Tensor:
    """Cross entropies and entropies at the temperature of ``shard``, without label smoothing; float32 [2, n].

    Other arguments are those of :func:`isthmus.engine.loss.linear_cross_entropy.linear_cross_entropy`. The entropies
    have a gradient only with ``entropy_gradient``.
    """
    return torch.stack(_PolicyValues.apply(hidden, weight, shard.bias, labels, shard, entropy_gradient))


class _PolicyValues(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        shard: VocabShard,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.weight, ctx.bias, ctx.shard, ctx.entropy_gradient = weight, bias, shard, entropy_gradient
        ctx.save_for_backward(hidden, weight, labels)
        chunks = [hidden.new_empty(0, 2, dtype=torch.float32)]
        for tokens, logits in shard.chunk_logits(hidden, weight, device_code(hidden).chunk_elements(hidden.device)):
            softcap = shard.apply_temperature(logits)
            chunks.append(chunk_values(logits, labels[tokens] - shard.start, shard.group, softcap)[0])
        losses, entropies = (values.clone() for values in torch.cat(chunks).unbind(1))
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return losses, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        shard: VocabShard = ctx.shard
        # Gradients of the logits before the division by the temperature.
        loss_grad, entropy_grad = (grad / shard.temperature for grad in grads)

        def add(gradients: Gradients) -> None:
            device = device_code(hidden)
            for tokens, logits in shard.chunk_logits(hidden, weight, device.chunk_elements(hidden.device)):
                softcap, targets = shard.apply_temperature(logits), labels[tokens] - shard.start
                entropy_part: Tensor | None = None
                if ctx.entropy_gradient:
                    values, norms = chunk_values(logits, targets, shard.group, softcap)
                    entropy_part = entropy_gradients(logits, values, norms, entropy_grad[tokens, None], softcap)
                device.chunk_losses(logits, targets, shard.group, gradients.scale_of(tokens), softcap, gradient=True)
                if entropy_part is not None:
                    logits += entropy_part
                gradients.add(tokens, logits, hidden, weight[: shard.rows])

        return *recomputed_gradients(hidden, ctx.weight, ctx.bias, loss_grad, add), None, None, None


def chunk_values(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Cross entropies and entropies, float32 [n, 2]; and largest logits and log-sums of exponentials relative to them.

    The arguments are those of :func:`isthmus.engine.loss.cross_entropy_cpu.chunk_losses`; ``logits`` do not change.
    """
    stats = torch.cat([row_statistics(logits[b], targets[b], softcap) for b in _blocks(logits)])
    parts = stats[None]
    if group is not None:
        parts = stats.new_empty(group.size(), *stats.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), stats, group=group)
    peaks, totals, weighted, labels = parts.unbind(2)
    peak = peaks.amax(0)
    below = peaks - peak
    total = (below.exp() * totals).sum(0)
    # Mean of the logits relative to the largest one, under p.
    mean = (below.exp() * (weighted + below * totals)).sum(0) / total
    log_total = total.log()
    cross_entropies = log_total + (peak - labels.sum(0))
    return torch.stack((cross_entropies, log_total - mean), 1), torch.stack((peak, log_total), 1)


def entropy_gradients(logits: Tensor, values: Tensor, norms: Tensor, scale: Tensor, softcap: float | None) -> Tensor:
    """Gradients of the entropies in ``logits`` [n, V / tp], times ``scale`` [n, 1], of the dtype of ``logits``.

    ``values`` and ``norms`` are the results of :func:`chunk_values`.
    """
    gradients = torch.empty_like(logits)
    for b in _blocks(logits):
        gradients[b] = row_gradients(logits[b], values[b], norms[b], scale[b], softcap)
    return gradients


def _blocks(logits: Tensor) -> list[slice]:
    """Rows at a time: on a CPU, those whose float32 values fit the cache."""
    size = cross_entropy_cpu.BLOCK_ELEMENTS // logits.size(1) if logits.device.type == "cpu" else logits.size(0)
    return [slice(start, start + max(1, size)) for start in range(0, logits.size(0), max(1, size))]


@compiled_on_gpu
def row_statistics(logits: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    """Statistics of each row, float32 [n, 4].

    Largest logit, sum of exponentials relative to it, sum of the relative logits times these, and logit of the target
    (0 for a target of another rank).
    """
    mine = (targets >= 0) & (targets < logits.size(1))
    capped, _ = capped_logits(logits, softcap)
    peak = capped.amax(1, keepdim=True)
    relative = capped - peak
    exponentials = relative.exp()
    label = capped.gather(1, targets.where(mine, 0)[:, None])[:, 0].where(mine, 0.0)
    return torch.stack((peak[:, 0], exponentials.sum(1), (exponentials * relative).sum(1), label), 1)


@compiled_on_gpu
def row_gradients(logits: Tensor, values: Tensor, norms: Tensor, scale: Tensor, softcap: float | None) -> Tensor:
    """Gradients of the entropies, float32 [n, V / tp]."""
    peak, log_total = norms[:, :, None].unbind(1)
    capped, slope = capped_logits(logits, softcap)
    log_p = capped - peak - log_total
    gradients = log_p.exp() * (log_p + values[:, 1:]) * -scale
    return gradients if slope is None else gradients * slope
