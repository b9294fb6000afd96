"""Tasks that compute the loss of a vocabulary shard on each tensor-parallel rank; see :mod:`ranks.tasks`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.config.schema import ParallelConfig
from isthmus.config.schema.distillation import DistillConfig
from isthmus.engine.loss.cross_entropy_cpu import Smoothing
from isthmus.engine.loss.linear_cross_entropy import (
    TeacherOutput,
    VocabShard,
    linear_cross_entropy,
    linear_distillation,
)
from isthmus.engine.loss.policy_values import policy_values
from isthmus.engine.parallel.process_groups import open_groups
from ranks.pool_worker import platform

VOCAB, HIDDEN, TOKENS = 301, 16, 37
"""The last rank has padding rows."""


def smoothed_loss(*, rate: float) -> list[float]:
    """Differences of loss and gradients from ``torch.nn.functional.cross_entropy(label_smoothing=rate)``."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(TOKENS, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    local_weight, rows, shard = shard_of(weight)
    mine = hidden.clone().requires_grad_()
    loss = linear_cross_entropy(
        mine,
        local_weight,
        labels,
        VocabShard(*shard, smoothing=Smoothing(rate, rate / VOCAB)),
        grad_scale=torch.tensor(2.0),
    )
    result = torch.autograd.grad(loss * 2, (mine, local_weight))
    hidden.requires_grad_()
    weight.requires_grad_()
    expected_values = torch.nn.functional.cross_entropy(
        hidden @ weight.t(), labels, reduction="sum", label_smoothing=rate
    )
    expected = torch.autograd.grad(expected_values * 2, (hidden, weight))
    return [relative(loss, expected_values), *gradient_differences(result, expected, rows)]


def distilled_loss(*, cases: list[dict[str, Any]]) -> list[float]:
    """For each case of section ``distill``, the largest difference between one rank and all, of loss and gradients."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(TOKENS, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator)
    teacher_hidden, teacher_weight = (
        torch.randn(TOKENS, 24, generator=generator),
        torch.randn(VOCAB, 24, generator=generator),
    )
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    local_weight, rows, shard = shard_of(weight)
    local_teacher_weight, _, _ = shard_of(teacher_weight)
    hidden.requires_grad_()
    weight.requires_grad_()
    results = []
    for case in cases:
        settings = DistillConfig(**case)
        full = TeacherOutput(teacher_hidden, teacher_weight, VocabShard(), settings)
        expected_values = linear_distillation(hidden, weight, labels, teacher=full)
        expected = torch.autograd.grad(expected_values[0], (hidden, weight))
        part = TeacherOutput(teacher_hidden, local_teacher_weight.detach(), VocabShard(*shard[:2]), settings)
        losses = linear_distillation(hidden, local_weight, labels, VocabShard(*shard), teacher=part)
        gradients = torch.autograd.grad(losses[0], (hidden, local_weight))
        results.append(max([relative(losses, expected_values), *gradient_differences(gradients, expected, rows)]))
    return results


def policy_values_of_shard(*, softcap: float | None, temperature: float) -> list[float]:
    """Differences of cross entropies, entropies and their gradients from those of torch on materialized logits."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(TOKENS, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator)
    labels, factors = (
        torch.randint(0, VOCAB, (TOKENS,), generator=generator),
        torch.randn(2, TOKENS, generator=generator),
    )
    local_weight, rows, shard = shard_of(weight)
    mine = hidden.clone().requires_grad_()
    values = policy_values(
        mine, local_weight, labels, VocabShard(*shard, softcap=softcap, temperature=temperature), entropy_gradient=True
    )
    result = torch.autograd.grad((values * factors).sum(), (mine, local_weight))
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = hidden @ weight.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    expected_values = torch.stack([-distribution.log_prob(labels), distribution.entropy()])
    expected = torch.autograd.grad((expected_values * factors).sum(), (hidden, weight))
    return [relative(values, expected_values), *gradient_differences(result, expected, rows)]


def shard_of(weight: Tensor) -> tuple[Tensor, slice, tuple[Any, ...]]:
    """This rank's rows of ``weight`` with padding, where they are, and the first arguments of their VocabShard."""
    ranks = dist.get_world_size()
    position = open_groups(ParallelConfig(tp=ranks), platform(), seed=0)
    size = -(-weight.size(0) // ranks)
    rows = slice(position.tp_rank * size, min((position.tp_rank + 1) * size, weight.size(0)))
    local = torch.full((size, weight.size(1)), 100.0)
    local[: rows.stop - rows.start] = weight[rows]
    return local.requires_grad_(), rows, (rows.start, rows.stop - rows.start, dist.group.WORLD if ranks > 1 else None)


def gradient_differences(result: tuple[Tensor, ...], expected: tuple[Tensor, ...], rows: slice) -> list[float]:
    """Of the hidden states, whose gradient is summed over ranks, and of the weight: the largest over all ranks."""
    summed = result[0].clone()
    dist.all_reduce(summed)
    number = rows.stop - rows.start
    assert not result[1][number:].any()
    differences = torch.tensor([relative(summed, expected[0]), relative(result[1][:number], expected[1][rows])])
    dist.all_reduce(differences, op=dist.ReduceOp.MAX)
    return list(differences.tolist())


def relative(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).abs().max() / expected.abs().max())
