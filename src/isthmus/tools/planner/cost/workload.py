"""What an optimizer step computes, independent of layout and hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.config.schema import RunConfig
from isthmus.families.architecture import Architecture
from isthmus.recipes.registry import recipe_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The answers that reinforcement learning generates for a step."""

    answers: int
    """Of a step, over all ranks."""
    new_tokens: int
    """Most tokens of an answer."""
    batch_size: int
    """Answers that a data-parallel rank generates at the same time."""
    updates: int = 1
    """Optimizer steps between two generations."""
    offload: bool = False
    """The optimizer state is in host memory while answers are generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The settings of a run that change the time of its steps.

    ``dataclasses.replace`` makes the variants of a search (micro batch size, recomputation).
    """

    architecture: Architecture
    precision: str
    """``bf16``, ``fp16``, ``fp32`` or ``fp8``."""
    seq_length: int
    """Tokens of a packed sequence."""
    global_batch_size: int
    micro_batch_size: int = 1
    samples_per_sequence: float = 1.0
    """Attention is within a sample, so packing several of equal length into a sequence makes it shorter."""
    sequences_per_sample: int = 1
    """Sequences that ``global_batch_size`` counts as one: 2 for preference pairs."""
    loss_share: float = 1.0
    """Share of the tokens whose logits are computed."""
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: tuple[str, ...] = ("core_attn",)
    recompute_layers: int | None = None
    """Recomputed layers of each pipeline stage, with ``full``; None: all."""
    lora_rank: int | None = None
    """Adapters of all linear layers, whose own weights are frozen; None: all weights are trained."""
    quantized: bool = False
    """Frozen weights are de-quantized for each matmul."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    offload: bool = False
    """Adam's moments are in host memory."""
    moe_dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    teacher: Architecture | None = None
    """Adds a forward pass: of the teacher of distillation, or of the model itself, for a KL divergence."""
    generation: Generation | None = None

    @classmethod
    def from_config(
        cls, config: RunConfig, architecture: Architecture, precision: str, *, teacher: Architecture | None = None
    ) -> Workload:
        """The steps of a run; ``precision`` is the resolved ``train.precision``.

        Adapters that start from ``lora.path`` count as those of rank 16, and frozen tensors as trained.
        """
        train, recipe = config.train, recipe_of(config)
        if recipe.has_extra_forward(config):
            teacher = architecture
        return cls(
            architecture=architecture,
            precision=precision,
            seq_length=config.data.seq_length,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            sequences_per_sample=recipe.samples_per_sequence,
            recompute=train.recompute,
            recompute_modules=tuple(train.recompute_modules),
            recompute_layers=train.recompute_layers,
            lora_rank=(config.lora.rank or 16) if config.lora.enabled else None,
            quantized=config.lora.quantize is not None,
            optimizer=config.optim.optimizer,
            offload=config.optim.offload,
            moe_dispatcher=config.moe.dispatcher,
            teacher=teacher,
            generation=_generation(config),
        )

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step, over all ranks."""
        return self.global_batch_size * self.sequences_per_sample * self.seq_length

    def recomputes(self, module: str) -> bool:
        """Whether selective recomputation includes this module."""
        return self.recompute == "selective" and module in self.recompute_modules


def _generation(config: RunConfig) -> Generation | None:
    if not recipe_of(config).generates_answers or config.rollout.engine != "native":
        return None
    rollout, answers = config.rollout, config.train.global_batch_size
    return Generation(
        answers=answers,
        new_tokens=rollout.max_new_tokens,
        batch_size=rollout.batch_size,
        updates=config.grpo.updates_per_rollout,
        offload=rollout.offload,
    )
