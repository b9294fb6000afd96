"""The Bradley-Terry loss of reward models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from isthmus.config.schema.dpo import RewardConfig
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.host_copies import to_device
from isthmus.engine.loss.objective import LossOutput, counts_batch, sample_sums


class RewardObjective:
    """The mean loss over the pairs of the global batch: ``-log sigmoid(chosen - rejected - margin)``."""

    per_token = True
    samples_per_unit = 2
    sums: tuple[str, ...] = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")

    def __init__(self, settings: RewardConfig) -> None:
        self.settings = settings

    def sample_weights(self, batch: PackedBatch) -> tuple[float, ...]:
        """Half a pair per answer, zero for padding."""
        samples = len(batch.sample_lengths)
        return (0.5,) * samples + (0.0,) * (len(batch.lengths) - samples)

    def loss(
        self, losses: Tensor, batch: PackedBatch, *, loss_tokens: int, mtp_tokens: int, mtp_weight: float
    ) -> LossOutput:
        """The summed loss of the pairs; ``losses``: float32 [n], the scores of this rank's answers."""
        answers = len(batch.sample_lengths)
        scores = sample_sums(losses, batch)[:answers]
        chosen, rejected = scores[::2], scores[1::2]
        margins = to_device(torch.tensor(batch.values[::2], dtype=scores.dtype), scores.device)
        pairs = -F.logsigmoid(chosen - rejected - margins)
        if self.settings.center_rewards_coefficient:
            pairs = pairs + self.settings.center_rewards_coefficient * (chosen + rejected).square()
        counted, loss = int(counts_batch()), pairs.sum()
        values = (chosen, rejected, chosen - rejected, (chosen > rejected).double())
        sums = {name: counted * value.detach().sum() for name, value in zip(self.sums, values, strict=True)}
        return LossOutput(loss.float(), counted * (answers // 2), counted * loss.detach(), sums)

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        return {name: value / max(1, count) for name, value in sums.items()}
