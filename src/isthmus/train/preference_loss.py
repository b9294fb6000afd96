"""Losses of pairs of answers: what a model prefers, and by how much more than it did at first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from isthmus.config.schema.dpo import DpoConfig
from isthmus.engine.objective import Measured, PackedLine, counts_line, learned_in_segments, log_probabilities

FIGURES = (
    "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected",
)  # fmt: skip
"""Means over pairs, by the names that TRL has for them."""


class PairedLine(PackedLine, Protocol):
    """A line of pairs; :class:`isthmus.data.batching.pair_batches.PairLine` is one."""

    @property
    def samples(self) -> Tensor:
        """int64 [num_samples], their numbers; the 2k-th and the one after it are a pair."""

    @property
    def reference(self) -> Tensor | None:
        """float64 [num_samples], log-probabilities under the reference."""


def pair_losses(margins: Tensor, settings: DpoConfig) -> Tensor:
    """The loss of each pair, [pairs].

    Args:
        margins: [pairs], how much more the log-probability of the chosen answer gained on the reference than that of
            the rejected one.
        settings: ``sigmoid`` is equation 7 of arXiv 2305.18290, its ``label_smoothing`` as in cDPO (equation 3 of the
            note of E. Mitchell, 2023: a share of the labels is the wrong way round); ``ipo`` is equation 17 of arXiv
            2310.12036, ``hinge`` that of SLiC (arXiv 2305.10425) on DPO's rewards.
    """
    beta, smoothing = settings.beta, settings.label_smoothing
    if settings.loss == "ipo":
        return (margins - 1 / (2 * beta)).square()
    rewards = beta * margins
    if settings.loss == "hinge":
        return torch.relu(1 - rewards)
    right = -F.logsigmoid(rewards)
    return right if not smoothing else (1 - smoothing) * right - smoothing * F.logsigmoid(-rewards)


class Preference:
    """The mean over the pairs of the global batch; an objective of :class:`isthmus.engine.step.Stepper`."""

    each = True

    def __init__(self, settings: DpoConfig) -> None:
        self.settings = settings
        self.sums = (*FIGURES, "nll_loss") if settings.sft_weight else FIGURES

    def shares(self, line: PairedLine) -> tuple[float, ...]:
        """Half a pair for an answer, nothing for padding."""
        answers = line.samples.numel()
        return (0.5,) * answers + (0.0,) * (line.cu_seqlens.numel() - 1 - answers)

    def measure(self, losses: Tensor, line: PairedLine, learned: int, ahead: int, ahead_weight: float) -> Measured:
        """The summed loss of a line's pairs, from the float32 cross entropies [n] of its learned tokens."""
        assert line.reference is not None
        settings, answers = self.settings, line.samples.numel()
        sums = log_probabilities(losses, line)[:answers]
        lengths = torch.tensor(learned_in_segments(line)[:answers], device=sums.device, dtype=sums.dtype)
        gains = sums - line.reference.to(sums.device)
        gains = gains / lengths if settings.length_normalized else gains
        margins = gains[::2] - gains[1::2]
        of_pairs = pair_losses(margins, settings)
        own = -sums[::2] / lengths[::2]
        loss = of_pairs.sum() + settings.sft_weight * own.sum() if settings.sft_weight else of_pairs.sum()
        rewards = settings.beta * gains.detach()
        told = {
            "rewards/chosen": rewards[::2],
            "rewards/rejected": rewards[1::2],
            "rewards/margins": rewards[::2] - rewards[1::2],
            "rewards/accuracies": (rewards[::2] > rewards[1::2]).double(),
            "logps/chosen": sums[::2].detach(),
            "logps/rejected": sums[1::2].detach(),
            "nll_loss": own.detach(),
        }
        counted = int(counts_line())
        return Measured(
            loss.float(),
            counted * (answers // 2),
            counted * loss.detach(),
            {name: counted * told[name].sum() for name in self.sums},
        )

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Means over the pairs."""
        return {name: value / max(1, count) for name, value in sums.items()}


class Recorder:
    """An objective that learns nothing: it writes down the log-probability of each sample it is shown."""

    each = True
    sums = ()

    def __init__(self, num_samples: int) -> None:
        self.found = torch.zeros(num_samples, dtype=torch.float64)
        """[num_samples]; zero for samples that other ranks were shown."""

    def shares(self, line: PairedLine) -> tuple[float, ...]:
        """Nothing counts."""
        return (0.0,) * (line.cu_seqlens.numel() - 1)

    def measure(self, losses: Tensor, line: PairedLine, learned: int, ahead: int, ahead_weight: float) -> Measured:
        """Write down."""
        found = log_probabilities(losses, line)[: line.samples.numel()]
        self.found[line.samples] = found.detach().cpu()
        return Measured(found.sum(), 0, 0.0)

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """None."""
        return {}
