"""The optimizer and its learning rate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from isthmus.config.schema.section import Count, Section, refuse


class OptimConfig(Section):
    """AdamW and its learning rate schedule."""

    lr: float = Field(default=2e-5, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the last step (not for the constant schedule)."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """How lr falls to min_lr after the warm-up; wsd (warm-up, stable, decay) falls in the last decay_steps only."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0 to lr."""
    decay_steps: Count | None = None
    """Steps of the final fall; needed with schedule wsd and only there."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of the matrices; norms and biases have none."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest gradient norm; a longer gradient is scaled down to it. 0: off."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the running mean of the gradient."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the running mean of the squared gradient."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the squared gradient's mean."""
    offload: bool = False
    """Keep the two running means (8 bytes a parameter) in the machine's memory, not the GPU's; steps get slower."""

    @model_validator(mode="after")
    def _schedule_fits(self) -> OptimConfig:
        if self.min_lr > self.lr:
            refuse("min_lr", f"min_lr={self.min_lr:g} is above lr={self.lr:g}; lower it")
        if self.schedule == "wsd" and self.decay_steps is None:
            refuse("decay_steps", "schedule wsd needs decay_steps, the number of steps of its final fall")
        if self.schedule != "wsd" and self.decay_steps is not None:
            refuse(
                "decay_steps",
                f"decay_steps={self.decay_steps} belongs to schedule wsd, got {self.schedule}; leave it out",
            )
        return self
