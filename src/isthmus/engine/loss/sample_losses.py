"""The losses of single samples of a step, measured in a forward pass of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.loss.objective import LossOutput, Objective, PerToken, counts_batch, sample_sums
from isthmus.engine.loss.policy_loss import PolicyObjective


@dataclass(frozen=True, slots=True)
class SampleLoss:
    sample: int
    """Index in the store; of the chosen answer of a pair."""
    loss: float
    """The sample's part of the loss sum of the step."""
    loss_tokens: int


class SampleLosses:
    """An objective that records the loss of each sample instead of their sum.

    Objectives of pairs and answers compute their own losses. For others, also distillation, it is the cross entropy.
    """

    samples_per_unit = 1
    sums: tuple[str, ...] = ()

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self.per_token: PerToken = objective.per_token if isinstance(objective, PolicyObjective) else True
        self.losses: list[SampleLoss] = []
        """On one of the ranks that share a packed sequence."""

    def sample_weights(self, batch: PackedBatch) -> tuple[float, ...]:
        return self._objective.sample_weights(batch)

    def loss(
        self, losses: Tensor, batch: PackedBatch, *, loss_tokens: int, mtp_tokens: int, mtp_weight: float
    ) -> LossOutput:
        # Over the context parallel ranks.
        if isinstance(self._objective, PolicyObjective):
            sums = self._objective.answer_losses(losses.detach(), batch)
        else:
            sums = sample_sums(losses.detach(), batch)
        if counts_batch() and parallel_state.get_tensor_model_parallel_rank() == 0:
            self.losses += self._losses(sums, batch)
        return LossOutput(sums.sum().float(), 0, 0.0)

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        return {}

    def _losses(self, sums: Tensor, batch: PackedBatch) -> Iterator[SampleLoss]:
        samples = len(batch.sample_lengths)
        if not self._objective.per_token or isinstance(self._objective, PolicyObjective):
            values = sums.tolist()
            for sample, value, tokens in zip(batch.sample_ids, values, batch.loss_tokens, strict=False):
                yield SampleLoss(sample, value, tokens)
            return
        size = self._objective.samples_per_unit
        for first in range(0, samples, size):
            part = slice(first, first + size)
            loss = self._loss_of(sums[part], batch, part)
            yield SampleLoss(batch.sample_ids[first], loss, sum(batch.loss_tokens[part]))

    def _loss_of(self, sums: Tensor, batch: PackedBatch, part: slice) -> float:
        """The objective's loss of an answer or a pair alone, whose loss tokens have these sums."""
        counts = batch.loss_tokens[part]
        alone = replace(
            batch,
            lengths=batch.lengths[part],
            loss_tokens=counts,
            sample_ids=batch.sample_ids[part],
            values=batch.values[part],
            reference_logps=None if batch.reference_logps is None else batch.reference_logps[part],
            sample_weights=(),
            padding=0,
            spans=None,
        )
        losses = torch.cat([(total / max(1, count)).expand(count) for total, count in zip(sums, counts, strict=True)])
        return float(self._objective.loss(losses, alone, loss_tokens=sum(counts), mtp_tokens=0, mtp_weight=0.0).loss)
