"""The optimizer and its learning rate."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from isthmus.config.schema.section import Count, Section, refuse


def _of_recipe(schema: dict[str, Any]) -> None:
    """:class:`isthmus.config.schema.RunConfig` sets the default."""
    del schema["default"]


class OptimConfig(Section):
    """The optimizer and its learning rate schedule."""

    exclusive: ClassVar[tuple[str, ...]] = ("warmup_steps", "warmup_fraction")
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """adamw_8bit: AdamW of bitsandbytes with moments of 8 bits, 2 bytes per parameter instead of 8.
    muon: Muon for the weight matrices of the layers, each Hugging Face matrix and expert by itself, and AdamW for
    embeddings, output layer, norms, biases and routers."""
    lr: float = Field(default=2e-5, gt=0, json_schema_extra=_of_recipe)
    """Peak learning rate. Default: that of the recipe, for all weights or for adapters; see Learning rates."""
    lr_multipliers: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Learning rates of tensors relative to lr, by patterns of their Hugging Face names, such as
    {model.embed_tokens.*: 0.1}; the first matching pattern counts."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the schedule; constant ignores it."""
    schedule: Literal["cosine", "linear", "wsd", "constant", "polynomial", "cosine_with_restarts", "inverse_sqrt"] = (
        "cosine"
    )
    """Decay from lr to min_lr after the warm-up; wsd (warm-up, stable, decay) decays in the last decay_steps only.
    inverse_sqrt: lr * sqrt(warmup_steps / step), at least min_lr."""
    power: float = Field(default=1.0, gt=0)
    """polynomial: exponent of the decay; 1 is linear."""
    num_cycles: Count = 1
    """cosine_with_restarts: number of cosine decays from lr, of equal length."""
    warmup_steps: int = Field(default=0, ge=0, le=2**31 - 1)
    """Steps over which the learning rate rises from 0 to lr."""
    warmup_fraction: float = Field(default=0.0, ge=0, lt=1, json_schema_extra=_of_recipe)
    """Instead of warmup_steps: share of the run's steps, rounded down. Default, unless warmup_steps is given: that of
    the recipe; schedules constant, wsd and inverse_sqrt have none."""
    schedule_steps: Count | None = None
    """cosine, linear, polynomial, cosine_with_restarts: step of the run at which lr reaches min_lr; null: the last."""
    decay_steps: Count | None = None
    """Steps of the final decay; required for schedule wsd and only allowed there."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of weight matrices; norms and biases have none."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Maximum gradient norm; larger gradients are scaled down to it. 0: no clipping."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of Adam's first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay rate of Adam's second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of Adam's update."""
    muon_lr: float | None = Field(default=None, gt=0)
    """muon: peak learning rate of the matrices; their schedule is that of lr. null: lr."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """muon: decay rate of the (Nesterov) momentum."""
    muon_ns_steps: int = Field(default=5, ge=1, le=100)
    """muon: Newton-Schulz iterations."""
    muon_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """muon: factor of the update of a matrix [M, N]: match_rms_adamw: 0.2 sqrt(max(M, N)), for learning rates of AdamW
    (Moonlight); original: sqrt(max(1, M / N)), for learning rates about 0.02 (Keller Jordan)."""
    offload: bool = False
    """Keep Adam's moments (8 bytes per parameter) in host memory instead of GPU memory; steps get slower."""

    def warmup(self, steps: int) -> int:
        """Steps of the warm-up in a run of ``steps``."""
        return self.warmup_steps or int(self.warmup_fraction * steps)

    @model_validator(mode="after")
    def _settings_fit_the_optimizer(self) -> OptimConfig:
        if self.offload and self.optimizer != "adamw":
            refuse("offload", f"offload=true is for optimizer=adamw, got {self.optimizer}; leave one out")
        for name, field in type(self).model_fields.items() if self.optimizer != "muon" else ():
            if name.startswith("muon_") and getattr(self, name) != field.default:
                refuse(name, f"{name}={getattr(self, name)} is for optimizer=muon, got {self.optimizer}; leave it out")
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> OptimConfig:
        if self.warmup_steps and self.warmup_fraction:
            refuse(
                "warmup_fraction",
                f"got warmup_steps={self.warmup_steps} and warmup_fraction={self.warmup_fraction:g}; keep one of them",
            )
        if self.min_lr > self.lr:
            refuse("min_lr", f"min_lr={self.min_lr:g} is above lr={self.lr:g}; lower it")
        if self.schedule == "wsd" and self.decay_steps is None:
            refuse("decay_steps", "schedule wsd needs decay_steps, the number of steps of its final decay")
        if self.schedule != "wsd" and self.decay_steps is not None:
            refuse(
                "decay_steps",
                f"decay_steps={self.decay_steps} is for schedule wsd, got {self.schedule}; leave it out",
            )
        ending = ("cosine", "linear", "polynomial", "cosine_with_restarts")
        if self.schedule_steps is not None and self.schedule not in ending:
            refuse(
                "schedule_steps",
                f"schedule_steps={self.schedule_steps} is for schedules {', '.join(ending)}, got {self.schedule}; "
                "leave it out",
            )
        for name, owner in (("power", "polynomial"), ("num_cycles", "cosine_with_restarts")):
            if getattr(self, name) != 1 and self.schedule != owner:
                refuse(
                    name, f"{name}={getattr(self, name):g} is for schedule {owner}, got {self.schedule}; leave it out"
                )
        if self.schedule == "inverse_sqrt" and not (self.warmup_steps or self.warmup_fraction):
            refuse("warmup_steps", "schedule inverse_sqrt is lr * sqrt(warmup_steps / step) and needs a warm-up")
        if self.schedule_steps is not None and self.schedule_steps <= self.warmup_steps:
            refuse(
                "schedule_steps",
                f"schedule_steps={self.schedule_steps} must be larger than warmup_steps={self.warmup_steps}; raise it, "
                "or leave it out",
            )
        return self
