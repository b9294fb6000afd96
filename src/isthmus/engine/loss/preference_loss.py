"""Preference losses on pairs of answers, with and without a reference model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from isthmus.config.schema.dpo import DpoConfig
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.host_copies import to_device
from isthmus.engine.loss.objective import LossOutput, counts_batch, sample_log_probs

METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
"""Means over pairs, with TRL's names."""


def pair_losses(chosen: Tensor, rejected: Tensor, settings: DpoConfig) -> Tensor:
    """The loss of each pair, [pairs].

    ``sigmoid``: equation 7 of arXiv 2305.18290, with the ``label_smoothing`` of cDPO (E. Mitchell, 2023, equation 3);
    ``robust``: equation 12 of arXiv 2403.00409; ``ipo``: equation 17 of arXiv 2310.12036; ``hinge``: SLiC (arXiv
    2305.10425) on DPO's rewards; ``simpo``: equation 6 of arXiv 2405.14734; ``cpo``: equation 3 of arXiv 2401.08417;
    ``orpo``: the odds ratio of arXiv 2403.07691, equation 7, times beta.

    Args:
        chosen: [pairs], log-probabilities of the chosen answers, minus those under the reference if the loss has one.
        rejected: the same for the rejected answers.
    """
    beta, smoothing = settings.beta, settings.label_smoothing
    margins = chosen - rejected
    if settings.loss == "ipo":
        return (margins - 1 / (2 * beta)).square()
    if settings.loss == "orpo":
        return -beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    rewards = beta * margins
    if settings.loss == "hinge":
        return torch.relu(1 - rewards)
    if settings.loss == "simpo":
        rewards = rewards - settings.simpo_gamma
    right, wrong = -F.logsigmoid(rewards), -F.logsigmoid(-rewards)
    if settings.loss == "robust":
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    return right if not smoothing else (1 - smoothing) * right + smoothing * wrong


def _log_odds(logps: Tensor) -> Tensor:
    """``log(p / (1 - p))`` for ``log(p)``, finite also where p rounds to one."""
    logps = logps.clamp(max=-torch.finfo(logps.dtype).eps)
    return logps - torch.log(-torch.expm1(logps))


class PreferenceObjective:
    """The mean preference loss over the pairs of the global batch."""

    per_token = True
    samples_per_unit = 2

    def __init__(self, settings: DpoConfig) -> None:
        self.settings = settings
        self.sums: tuple[str, ...] = (*METRICS, "nll_loss") if settings.nll_weight else METRICS

    def sample_weights(self, batch: PackedBatch) -> tuple[float, ...]:
        """Half a pair per answer, zero for padding."""
        samples = len(batch.sample_lengths)
        return (0.5,) * samples + (0.0,) * (len(batch.lengths) - samples)

    def loss(
        self, losses: Tensor, batch: PackedBatch, *, loss_tokens: int, mtp_tokens: int, mtp_weight: float
    ) -> LossOutput:
        """The summed loss of the pairs; ``losses``: float32 cross entropies [n] of the loss tokens."""
        settings, answers = self.settings, len(batch.sample_lengths)
        logps = sample_log_probs(losses, batch)[:answers]
        lengths = to_device(torch.tensor(batch.loss_tokens[:answers], dtype=logps.dtype), logps.device)
        ratios = logps
        if settings.has_reference:
            assert batch.reference_logps is not None
            ratios = logps - to_device(batch.reference_logps, logps.device)
        if settings.length_normalized or settings.loss in ("simpo", "orpo"):
            ratios = ratios / lengths
        loss = pair_losses(ratios[::2], ratios[1::2], settings).sum()
        nll = -logps[::2] / lengths[::2]
        if settings.nll_weight:
            loss = loss + settings.nll_weight * nll.sum()
        rewards = settings.beta * ratios.detach()
        values = {
            "rewards/chosen": rewards[::2],
            "rewards/rejected": rewards[1::2],
            "rewards/margins": rewards[::2] - rewards[1::2],
            "rewards/accuracies": (rewards[::2] > rewards[1::2]).double(),
            "logps/chosen": logps[::2].detach(),
            "logps/rejected": logps[1::2].detach(),
            "nll_loss": nll.detach(),
        }
        counted = int(counts_batch())
        sums = {name: counted * values[name].sum() for name in self.sums}
        return LossOutput(loss.float(), counted * (answers // 2), counted * loss.detach(), sums)

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        return {name: value / max(1, count) for name, value in sums.items()}


class LogProbRecorder:
    """Records the log-probability of each sample; has no loss."""

    per_token = True
    samples_per_unit = 1
    sums: tuple[str, ...] = ()

    def __init__(self, num_samples: int) -> None:
        self.logps: Tensor = torch.zeros(num_samples, dtype=torch.float64)
        """Zero for samples of other ranks."""

    def sample_weights(self, batch: PackedBatch) -> tuple[float, ...]:
        return (0.0,) * len(batch.lengths)

    def loss(
        self, losses: Tensor, batch: PackedBatch, *, loss_tokens: int, mtp_tokens: int, mtp_weight: float
    ) -> LossOutput:
        logps = sample_log_probs(losses, batch)[: len(batch.sample_lengths)]
        self.logps[list(batch.sample_ids)] = logps.detach().cpu()
        return LossOutput(logps.sum(), 0, 0.0)

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        return {}
