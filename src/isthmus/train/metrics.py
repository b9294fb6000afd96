"""The metrics of an optimizer step, and the line that reports them on the screen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_ONLY_IF_KNOWN = ("loss_scale", "skipped", "memory_used")
_KEYS = {"loss_tokens": "learned_tokens"}
"""Keys of metrics.jsonl that are named differently."""
_PRINTED = {"rewards/margins": "margin", "rewards/accuracies": "accuracy"}
"""Metrics of the objective that are printed, and their names on the screen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """The metrics of one optimizer step, over all ranks."""

    step: int
    """1 is the first step."""
    loss: float
    """Mean over the loss tokens of the global batch, or over its pairs."""
    objective: Mapping[str, float] = field(default_factory=dict)
    """Other metrics of the objective: ``mtp_loss`` of MTP layers, or rewards of dpo."""
    lr: float
    grad_norm: float
    tokens_per_s: float
    """Of the whole run, without padding."""
    tflops_per_device: float | None = None
    """Model FLOPs, attention counted causal; None where they are not known."""
    mfu: float | None = None
    """Share of the device's peak, 0..1; None where the peak is not known."""
    memory_gib: float
    """Peak of this rank so far."""
    memory_used: float | None = None
    """Share of the device's memory (on a CPU: the machine's) in use by all processes, 0..1."""
    num_tokens: int
    loss_tokens: int
    padding: float = 0.0
    """Share of padding in the packed sequences, 0..1."""
    step_time_s: float
    consumed_sequences: int
    """Since the start of the run."""
    global_batch_size: int = 0
    """Sequences of the step."""
    loss_scale: float | None = None
    """fp16 only; None in other precisions."""
    skipped: int | None = None
    """fp16 only: steps so far whose gradient overflowed; they update nothing and halve the loss scale."""
    moe: Mapping[str, float] = field(default_factory=dict)
    """MoE models: ``load_max_over_mean``, and the router losses in use."""

    def flat(self) -> dict[str, Any]:
        """The row of metrics.jsonl: nested metrics by name, those of experts as ``moe_load_max_over_mean``."""
        row = asdict(self)
        del row["global_batch_size"]
        row = {name: value for name, value in row.items() if value is not None or name not in _ONLY_IF_KNOWN}
        row = {"step": row.pop("step"), "loss": row.pop("loss"), **row.pop("objective"), **row}
        row |= {f"moe_{name}": value for name, value in row.pop("moe").items()}
        return {_KEYS.get(name, name): value for name, value in row.items()}


def step_line(m: StepMetrics, total_steps: int, *, device: str, left_s: float | None) -> str:
    """The line of a step on the screen.

    Args:
        m: of the step.
        total_steps: last step of the run.
        device: unit of TFLOP/s: "GPU" or "rank".
        left_s: estimated seconds to the end of the run.
    """
    parts = [
        f"step {m.step}/{total_steps}",
        f"loss {m.loss:.4f}",
        *printed(m.objective),
        f"lr {m.lr:.2e}",
        f"grad norm {m.grad_norm:.3f}",
        f"{m.tokens_per_s:,.0f} tokens/s",
    ]
    if m.tflops_per_device is not None:
        parts.append(f"{m.tflops_per_device:.3g} TFLOP/s/{device} (causal)")
    if m.mfu is not None:
        parts.append(f"MFU {m.mfu:.1%}")
    if m.loss_scale is not None:
        parts.append(f"loss scale {m.loss_scale:g} ({m.skipped} skipped)")
    parts.append(f"{m.memory_gib:.2f} GiB")
    if left_s is not None:
        parts.append(f"{duration(left_s)} left")
    return "  ".join(parts)


def printed(objective: Mapping[str, float]) -> list[str]:
    """The metrics of the objective that are printed."""
    return [f"{name} {objective[key]:.3f}" for key, name in _PRINTED.items() if key in objective]


def duration(seconds: float) -> str:
    """``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
