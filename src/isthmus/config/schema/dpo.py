"""Training on preferences: pairs of answers, answers with labels, and reward models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from isthmus.config.schema.section import Section, refuse


class DpoConfig(Section):
    """Preference losses: direct preference optimization (arXiv 2305.18290) and its variants."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the constraint to the reference: a reward is beta times the gain in log-probability over it. simpo,
    cpo: factor of the log-probabilities; orpo: weight of the odds ratio."""
    loss: Literal["sigmoid", "robust", "ipo", "hinge", "simpo", "cpo", "orpo"] = "sigmoid"
    """Loss on the difference of a pair's rewards: that of DPO (sigmoid), robust DPO, IPO or SLiC (hinge). Without a
    reference model: SimPO, CPO or ORPO."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """sigmoid, robust, simpo, cpo: assumed share of pairs with swapped labels."""
    simpo_gamma: float = Field(default=0.5, ge=0)
    """simpo: the reward margin that the loss aims at."""
    sft_weight: float | None = Field(default=None, ge=0)
    """Weight of the cross entropy of the chosen answer (mean over its tokens), added to the loss of the pair. null: 1
    for cpo and orpo, else 0."""
    length_normalized: bool = False
    """Use the mean over an answer's tokens as its log-probability, not the sum. simpo and orpo always do."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss needs the log-probabilities of a reference model."""
        return self.loss not in ("simpo", "cpo", "orpo")

    @property
    def nll_weight(self) -> float:
        """``sft_weight`` with the default of the loss."""
        return float(self.loss in ("cpo", "orpo")) if self.sft_weight is None else self.sft_weight

    @model_validator(mode="after")
    def _smoothing_fits(self) -> DpoConfig:
        smoothed = ("sigmoid", "robust", "simpo", "cpo")
        if self.label_smoothing and self.loss not in smoothed:
            refuse(
                "label_smoothing",
                f"label_smoothing={self.label_smoothing:g} is for loss={', '.join(smoothed)}, got {self.loss}; leave "
                "it out",
            )
        return self


class KtoConfig(Section):
    """Kahneman-Tversky optimization (arXiv 2402.01306) on answers with labels."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the constraint to the reference: a reward is beta times the gain in log-probability over it."""
    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto compares rewards with the KL divergence from the reference, estimated in each step; apo_zero_unpaired (arXiv
    2408.06266) compares them with 0."""
    desirable_weight: float = Field(default=1.0, ge=0)
    """Weight of the losses of desirable answers."""
    undesirable_weight: float = Field(default=1.0, ge=0)
    """Weight of the losses of undesirable answers."""


class RewardConfig(Section):
    """Training of a reward model on preference pairs, with the Bradley-Terry loss."""

    center_rewards_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the squared sum of a pair's rewards, which keeps the mean reward near 0 (arXiv 2312.09244); 0.01 is
    recommended."""
