"""What a run trains on, and what it returns."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import Any

from isthmus.config.schema import RunConfig
from isthmus.data.batching.batches import Batches
from isthmus.errors import counted
from isthmus.recipes.data.data_notes import epochs_text
from isthmus.recipes.plan.model_plan import ModelPlan
from isthmus.recipes.plan.parameter_counts import num_parameters
from isthmus.recipes.plan.validation import RunContext
from isthmus.recipes.registry import recipe_of


@dataclass(frozen=True, slots=True)
class RunData:
    train: Batches
    valid: Batches | None
    test: Batches | None
    steps: int
    fingerprint: str
    """Equal for two runs whose step k has the same sequences."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a finished run."""

    out: str
    model: str | None
    """The exported Hugging Face folder; None without ``checkpoint.export_final``, or if only adapters are exported."""
    adapter: str | None
    """The exported adapter of PEFT; None without adapters or ``checkpoint.export_final``."""
    pushed: str | None
    """Address of the repository; None without ``checkpoint.push``, and on other ranks than the first."""
    steps: int
    loss: float | None
    """Loss of the last step; None if the run had no steps left."""
    valid_loss_before: float | None
    """Validation loss before the first step, also of a run that was resumed."""
    valid_loss: float | None
    test_loss: float | None
    tokens_per_s: float | None
    """Without the first step, which warms up."""
    memory_gib: float
    """Peak of the rank with most."""

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)

    def next_commands(self, config: RunConfig) -> list[str]:
        """What to type after the run: commands for its folder."""
        out = shlex.quote(self.out)
        commands = [f"isthmus report {out}"]
        if self.model is not None and not recipe_of(config).trains_scores:
            return [f"isthmus chat {out}", *commands, f"isthmus eval {out} --tasks hellaswag"]
        if self.model is None and self.adapter is not None and config.model.path is not None:
            base, adapter = shlex.quote(config.model.path), shlex.quote(self.adapter)
            commands.append(f"isthmus merge {base} {adapter} {shlex.quote(self.out.rstrip('/') + '-merged')}")
        return commands


def describe(context: RunContext, data: RunData) -> str:
    """Steps, epochs, tokens of a step and parameters."""
    epochs = data.steps * data.train.global_batch_size / data.train.sequences_per_epoch
    passes = "random tokens" if context.config.data.mock else epochs_text(context.config, epochs)
    return (
        f"training: {counted(data.steps, 'step')}, {passes}, "
        f"{step_tokens(context.config, data.train.tokens_per_step)}; {describe_parameters(context.plan)}"
    )


def step_tokens(config: RunConfig, tokens: float, *, estimated: bool = False) -> str:
    """The tokens of a step; those with generated answers are the most."""
    text = f"{'about ' if estimated else ''}{tokens:,.0f} tokens per step"
    if recipe_of(config).generates_answers:
        text = f"up to {text} (answers of {counted(config.rollout.max_new_tokens, 'token')})"
    return text


def describe_parameters(plan: ModelPlan) -> str:
    total, trained = (num_parameters(plan.family, plan.architecture, frozen) for frozen in ((), plan.frozen))
    trained += 0 if plan.adapters is None else plan.adapters.num_parameters
    return f"{total:,} parameters, {trained:,} trainable"
