"""Training on preference pairs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from isthmus.config.schema.section import Section, refuse


class DpoConfig(Section):
    """Direct preference optimization (arXiv 2305.18290)."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the constraint to the reference: a reward is beta times the gain in log-probability over it."""
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Loss on the difference of a pair's rewards: that of DPO (sigmoid), IPO (ipo) or SLiC (hinge)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """sigmoid: assumed share of pairs with swapped labels."""
    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of the cross entropy of the chosen answer (mean over its tokens), added to the loss of the pair."""
    length_normalized: bool = False
    """Use the mean over an answer's tokens as its log-probability, not the sum."""

    @model_validator(mode="after")
    def _smoothing_fits(self) -> DpoConfig:
        if self.label_smoothing and self.loss != "sigmoid":
            refuse(
                "label_smoothing",
                f"label_smoothing={self.label_smoothing:g} is for loss=sigmoid, got {self.loss}; leave it out",
            )
        return self
