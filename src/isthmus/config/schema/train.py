"""How long a run is, how much it takes at once, and in which numbers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from isthmus.config.schema.section import Count, Interval, Section, refuse

RecomputedModule = Literal["core_attn", "mlp", "moe"]
_OF_PRECISION = {"fp16": ("initial_loss_scale", "loss_scale_window"), "fp8": ("fp8_scaling", "fp8_format")}
"""Settings that mean something in one precision only."""


class TrainConfig(Section):
    """How long, how much at once, and in which numbers."""

    steps: Count | None = None
    """Optimizer steps; give this or epochs."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the training data, also in parts; 1 when steps is not given either."""
    global_batch_size: Count = 16
    """Sequences (dpo: pairs) per optimizer step, over all ranks."""
    micro_batch_size: Count = 1
    """Sequences (dpo: pairs) per forward pass of one data parallel rank."""
    precision: Literal["fp32", "bf16", "fp16", "fp8"] | None = None
    """Numbers of the model's arithmetic (all but fp32 keep float32 main weights); null: what suits the platform."""
    initial_loss_scale: float = Field(default=4096.0, ge=1)
    """fp16: what the loss is multiplied by at first; halved, down to 1, by each step whose gradient overflows."""
    loss_scale_window: Count = 1000
    """fp16: steps in a row without overflow after which the loss scale is doubled."""
    fp8_scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    """fp8: one scale for each matrix, or one for each of its rows and columns."""
    fp8_format: Literal["hybrid", "e4m3"] = "hybrid"
    """fp8: hybrid has gradients in e5m2, of more range and less precision; e4m3 has everything in e4m3."""
    seed: int = Field(default=0, ge=0)
    """Seed of random weights and of the random streams of training."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that are computed again in the backward pass instead of being kept."""
    mtp_loss_weight: float = Field(default=0.1, gt=0)
    """What the loss of layers that predict ahead counts beside the model's own, where the weights have such layers."""
    recompute_modules: Annotated[tuple[RecomputedModule, ...], Field(strict=False)] = ("core_attn",)
    """selective: what is computed again: attention's core, dense feed-forward blocks, mixtures of experts."""
    recompute_layers: Count | None = None
    """full: layers of each pipeline stage, its first ones, that are computed again; null: all of them."""
    eval_every: Interval = None
    """Steps between evaluations on held-out data; null or 0: only before the first and after the last step."""
    profile: Annotated[str, Field(pattern=r"^[1-9][0-9]*-[1-9][0-9]*$")] | None = None
    """Steps to profile, first and last, such as 3-5: a trace and a table of each rank in the run folder; null: none."""
    threads: Count | None = None
    """CPU threads per rank; null: the machine's cores shared out evenly among its ranks."""

    @model_validator(mode="before")
    @classmethod
    def _one_epoch_by_default(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("steps") is None and given.get("epochs") is None:
            return given | {"epochs": 1.0}
        return given

    @property
    def profiled_steps(self) -> range:
        """Steps to profile, counted from 1; empty for none."""
        if self.profile is None:
            return range(0)
        first, last = map(int, self.profile.split("-"))
        return range(first, last + 1)

    @model_validator(mode="after")
    def _profile_fits(self) -> TrainConfig:
        steps = self.profiled_steps
        if self.profile is not None and not steps:
            refuse("profile", f"profile={self.profile} ends before it begins; give the first step, then the last")
        if steps and self.steps is not None and steps[-1] > self.steps:
            refuse(
                "profile",
                f"profile={self.profile} goes beyond the {self.steps} steps of the run; name steps from 1 to "
                f"{self.steps}",
            )
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> TrainConfig:
        if self.steps is not None and self.epochs is not None:
            refuse("epochs", f"steps={self.steps} and epochs={self.epochs:g} are both given; keep one of them")
        if self.recompute_layers is not None and self.recompute != "full":
            refuse(
                "recompute_layers",
                f"recompute_layers={self.recompute_layers} belongs to recompute=full, got {self.recompute}; "
                "leave it out",
            )
        if self.recompute_modules not in (("core_attn",), ()) and self.recompute != "selective":
            refuse(
                "recompute_modules",
                f"recompute_modules belongs to recompute=selective, got {self.recompute}; leave it out",
            )
        if not self.recompute_modules:
            refuse("recompute_modules", "recompute_modules names nothing; use core_attn, mlp or moe")
        for precision, names in _OF_PRECISION.items():
            for name in names if self.precision != precision else ():
                if getattr(self, name) != type(self).model_fields[name].default:
                    refuse(name, f"{name} belongs to precision={precision}, got {self.precision}; leave it out")
        if self.global_batch_size % self.micro_batch_size:
            below = self.global_batch_size // self.micro_batch_size * self.micro_batch_size
            near = " or ".join(str(size) for size in (below, below + self.micro_batch_size) if size)
            refuse(
                "global_batch_size",
                f"global_batch_size={self.global_batch_size} is not a multiple of "
                f"micro_batch_size={self.micro_batch_size}; use {near} sequences",
            )
        return self
