"""How pairs of answers are learned from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from isthmus.config.schema.section import Section, refuse


class DpoConfig(Section):
    """Direct preference optimization (arXiv 2305.18290): what is made of a pair's log-probabilities."""

    beta: float = Field(default=0.1, gt=0)
    """How strongly the model is held to its starting weights: a reward is beta times the gain in log-probability."""
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """What is made of the difference of a pair's rewards: DPO's own (sigmoid), or that of IPO or SLiC (hinge)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """sigmoid: share of the pairs that are taken to be labelled the wrong way round."""
    sft_weight: float = Field(default=0.0, ge=0)
    """What the loss of the chosen answer by itself, a mean over its tokens, counts beside that of the pair."""
    length_normalized: bool = False
    """Take the mean over an answer's tokens for its log-probability, and not the sum."""

    @model_validator(mode="after")
    def _smoothing_fits(self) -> DpoConfig:
        if self.label_smoothing and self.loss != "sigmoid":
            refuse(
                "label_smoothing",
                f"label_smoothing={self.label_smoothing:g} belongs to loss=sigmoid, got {self.loss}; leave it out",
            )
        return self
