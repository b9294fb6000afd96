"""KTO: losses of answers with labels, relative to the KL divergence of the policy from the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isthmus.config.schema.dpo import KtoConfig
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.host_copies import to_device
from isthmus.engine.loss.objective import LossOutput, MeanLoss, counts_batch, sample_log_probs


def answer_losses(ratios: Tensor, desirable: Tensor, kl: float, settings: KtoConfig) -> Tensor:
    """The weighted loss of each answer, [answers].

    Equation 7 of arXiv 2402.01306; with a ``kl`` of 0 it is APO-zero (equation 7 of arXiv 2408.06266), unpaired.

    Args:
        ratios: [answers], log-probabilities minus those under the reference.
        desirable: bool [answers].
        kl: KL divergence of the policy from the reference.
    """
    sign = torch.where(desirable, 1.0, -1.0).to(ratios.dtype)
    weights = torch.where(desirable, settings.desirable_weight, settings.undesirable_weight)
    return weights * (1 - torch.sigmoid(settings.beta * sign * (ratios - kl)))


class KtoObjective:
    """The mean loss over the answers of the global batch."""

    per_token = True
    samples_per_unit = 1
    sums: tuple[str, ...] = ("desirable", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl")

    def __init__(self, settings: KtoConfig) -> None:
        self.settings = settings
        self.kl: float = 0.0
        """KL divergence of the policy from the reference, estimated before each global batch."""

    def prepare(self, batches: Sequence[PackedBatch], mean_loss: MeanLoss) -> None:
        """Estimate the KL divergence in a forward pass over the mismatched answers, if the loss needs it.

        It is a mean over the global batch, at least 0, so it does not depend on the layout. TRL takes the mean over the
        micro batches that its ranks have at the same time.
        """
        if self.settings.loss == "kto":
            mismatched = [batch.mismatched for batch in batches if batch.mismatched is not None]
            self.kl = max(0.0, mean_loss(mismatched, _MismatchedKl()))

    def sample_weights(self, batch: PackedBatch) -> tuple[float, ...]:
        """One per answer, zero for padding."""
        samples = len(batch.sample_lengths)
        return (1.0,) * samples + (0.0,) * (len(batch.lengths) - samples)

    def loss(
        self, losses: Tensor, batch: PackedBatch, *, loss_tokens: int, mtp_tokens: int, mtp_weight: float
    ) -> LossOutput:
        """The summed loss of the answers; ``losses``: float32 cross entropies [n] of the loss tokens."""
        logps, ratios = _log_ratios(losses, batch)
        desirable = to_device(torch.tensor(batch.values, dtype=torch.bool), logps.device)
        loss = answer_losses(ratios, desirable, self.kl, self.settings).sum()
        rewards = self.settings.beta * ratios.detach()
        values = {
            "desirable": desirable,
            "rewards/chosen": rewards * desirable,
            "rewards/rejected": rewards * ~desirable,
            "logps/chosen": logps.detach() * desirable,
            "logps/rejected": logps.detach() * ~desirable,
        }
        counted, answers = int(counts_batch()), len(batch.values)
        sums: dict[str, Tensor | float] = {name: counted * value.double().sum() for name, value in values.items()}
        sums["kl"] = counted * answers * self.kl
        return LossOutput(loss.float(), counted * answers, counted * loss.detach(), sums)

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Means over desirable (chosen) or undesirable (rejected) answers, if there are any, with TRL's names."""
        counts = {"chosen": sums["desirable"], "rejected": count - sums["desirable"]}
        metrics = {
            f"{what}/{side}": sums[f"{what}/{side}"] / number
            for what in ("rewards", "logps")
            for side, number in counts.items()
            if number
        }
        if all(counts.values()):
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return metrics | ({"kl": sums["kl"] / max(1, count)} if self.settings.loss == "kto" else {})


class _MismatchedKl:
    """The mean gain in log-probability of mismatched answers over the reference."""

    per_token = True
    samples_per_unit = 1
    sums: tuple[str, ...] = ()

    def sample_weights(self, batch: PackedBatch) -> tuple[float, ...]:
        return (0.0,) * len(batch.lengths)

    def loss(
        self, losses: Tensor, batch: PackedBatch, *, loss_tokens: int, mtp_tokens: int, mtp_weight: float
    ) -> LossOutput:
        _, ratios = _log_ratios(losses, batch)
        counted = int(counts_batch())
        return LossOutput(ratios.sum(), counted * len(ratios), counted * ratios.sum())

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        return {}


def _log_ratios(losses: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the answers, [answers], and their gain over the reference."""
    assert batch.reference_logps is not None
    logps = sample_log_probs(losses, batch)[: len(batch.sample_lengths)]
    return logps, logps - to_device(batch.reference_logps, logps.device)
