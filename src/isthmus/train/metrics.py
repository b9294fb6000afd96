"""The metrics of an optimizer step, and the lines that print them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

_ONLY_IF_KNOWN = ("loss_scale", "skipped", "memory_used")
_PRINTED = {
    "perplexity": "ppl",
    "mean_token_accuracy": "acc",
    "rewards/margins": "margin",
    "rewards/accuracies": "acc",
    "sft_loss": "sft",
    "reward": "reward",
    "answer_tokens": "length",
}
"""Printed metrics of the objective, and their printed names."""
_PERFORMANCE = frozenset(
    "tokens_per_s tflops_per_device mfu memory_gib memory_used step_time_s slowest_rank slowest_rank_s median_rank_s "
    "straggler_share gpu_temperature_c gpu_power_w gpu_clock_mhz throttled_gpus".split()
)
_MEGATRON_NAMES = {"mtp_loss": "mtp_1 loss"}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """Metrics over all ranks."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the loss tokens of the global batch, or over its pairs."""
    objective: Mapping[str, float] = field(default_factory=dict)
    """Other metrics of the objective: ``mtp_loss`` of MTP layers, or rewards of DPO."""
    rollout: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the rollout that the step trains on. Each of its updates prints them; rows of metrics.jsonl have none:
    ``objective`` has them in the first update."""
    lr: float
    grad_norm: float
    tokens_per_s: float
    """Tokens of all ranks, without padding."""
    tflops_per_device: float | None = None
    """Model FLOPs with causal attention; None if unknown."""
    mfu: float | None = None
    """Model FLOPs utilization, 0..1; None if the peak of the device is unknown."""
    memory_gib: float
    """Peak of this rank so far."""
    memory_used: float | None = None
    """Used share of the device's memory (on a CPU: the machine's), by all processes, 0..1."""
    num_tokens: int
    loss_tokens: int
    padding: float = 0.0
    """Share of padding in the packed sequences, 0..1."""
    step_time_s: float
    consumed_sequences: int
    """Since the start of the run."""
    epoch: float | None = None
    """Passes over the training data at the end of the step; None for random tokens."""
    global_batch_size: int = 0
    loss_scale: float | None = None
    """fp16 only."""
    skipped: int | None = None
    """fp16 only: steps skipped so far because a gradient overflowed."""
    moe: Mapping[str, float] = field(default_factory=dict)
    """MoE models: ``load_max_over_mean`` and router losses."""

    ranks: Mapping[str, float] = field(default_factory=dict)
    """How the ranks differ, in the steps of ``logging.ranks_every``."""

    def flat(self) -> dict[str, Any]:
        """The row of metrics.jsonl; MoE metrics get the prefix ``moe_``."""
        row = asdict(self)
        del row["global_batch_size"], row["rollout"]
        row = {name: value for name, value in row.items() if value is not None or name not in _ONLY_IF_KNOWN}
        row = {"step": row.pop("step"), "loss": row.pop("loss"), **row.pop("objective"), **row}
        row |= {f"moe_{name}": value for name, value in row.pop("moe").items()} | row.pop("ranks")
        return row

    @property
    def printed(self) -> Mapping[str, float]:
        """Metrics that a printed line may have: the same keys in all updates on a rollout."""
        return {**self.rollout, **self.objective}


WIDTH = 80
"""Columns of the line of a step, at most."""
_DISPENSABLE = ("GiB", "left", "lr", "MFU", "TFLOP/s", "tok/s")
"""Cells without which a wide line still makes sense, in this order; metrics.jsonl has them."""


def step_line(m: StepMetrics, total_steps: int, *, left_s: float | None, device: str = "rank") -> str:
    """The printed line of a step: cells of constant width and unit; ``left_s`` is the remaining time in seconds.

    A line of more than ``WIDTH`` columns loses cells. A ``device`` "GPU" adds its MFU, or TFLOP/s if its peak is
    unknown.
    """
    cells = {"step": step_cell(m.step, total_steps), "loss": f"loss {m.loss:7.4f}"}
    cells |= printed(m.printed)
    cells |= {"lr": f"lr {m.lr:.2e}", "norm": f"norm {m.grad_norm:6.3f}", "tok/s": f"{m.tokens_per_s:7,.0f} tok/s"}
    if m.mfu is not None:
        cells["MFU"] = f"MFU {m.mfu:5.1%}"
    elif m.tflops_per_device is not None and device == "GPU":
        cells["TFLOP/s"] = f"{m.tflops_per_device:6.1f} TFLOP/s"
    if m.loss_scale is not None:
        cells["scale"] = f"loss scale {m.loss_scale:g} ({m.skipped} skipped)"
    cells |= {"GiB": f"{m.memory_gib:6.2f} GiB", "left": " " * 12 if left_s is None else f"{duration(left_s):>7} left"}
    for name in _DISPENSABLE:
        if len("  ".join(cells.values())) > WIDTH:
            cells.pop(name, None)
    return "  ".join(cells.values()).rstrip()


def step_cell(step: int, total_steps: int) -> str:
    return f"step {step:>{len(str(total_steps))}}/{total_steps}"


def printed(objective: Mapping[str, float]) -> dict[str, str]:
    """The printed metrics of the objective by name."""
    formats = {"acc": "5.3f", "length": "7.1f"}  # lengths of at most 99,999 tokens
    return {
        name: f"{name} {objective[key]:{formats.get(name, '6.3f')}}"
        for key, name in _PRINTED.items()
        if key in objective
    }


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def sample_text(prompt: str, answer: str, width: int) -> str:
    """``prompt -> answer`` in ``width`` columns; a long prompt leaves two thirds to the answer."""
    prompt, answer = " ".join(prompt.split()), " ".join(answer.split())
    arrow = " -> "
    room = max(width - len(arrow) - len(answer), width // 3)
    return shortened(f"{shortened(prompt, room)}{arrow}{answer}", width)


def tracker_tag(key: str) -> str:
    """``train/...``, ``eval/...`` or ``perf/...`` for a key of metrics.jsonl."""
    if key.startswith("valid_"):
        return f"eval/{key.removeprefix('valid_')}"
    return f"{'eval' if key.startswith('test_') else 'perf' if key in _PERFORMANCE else 'train'}/{key}"


def duration(seconds: float) -> str:
    """``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def megatron_line(m: StepMetrics, total_steps: int, now: datetime | None = None) -> str:
    """The line of ``training_log`` (megatron/training/training.py), with ``mem usages`` of ROCm's Megatron-LM.

    TFLOP/s count causal attention, as in Megatron-LM since core 0.12. A loss that is not finite ends the run, so the
    number of nan iterations is always 0.
    """
    stamp = (now or datetime.now()).strftime("%Y-%m-%d %H:%M:%S")
    parts = [
        f" [{stamp}] iteration {m.step:8d}/{total_steps:8d}",
        f"consumed samples: {m.consumed_sequences:12d}",
        f"elapsed time per iteration (ms): {m.step_time_s * 1e3:.1f}",
    ]
    if m.memory_used is not None:
        parts.append(f"mem usages: {m.memory_used:.4f}")
    if m.tflops_per_device is not None:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {_rounded(m.tflops_per_device)}")
    parts += [f"learning rate: {m.lr:.6E}", f"global batch size: {m.global_batch_size:5d}", f"lm loss: {m.loss:.6E}"]
    # Megatron-LM prints every other result of its loss function after the loss, in the same format.
    parts += [f"{_MEGATRON_NAMES.get(name, name)}: {value:.6E}" for name, value in m.printed.items()]
    parts += [
        f"loss scale: {1.0 if m.loss_scale is None else m.loss_scale:.1f}",
        f"grad norm: {m.grad_norm:.3f}",
        f"number of skipped iterations: {m.skipped or 0:3d}",
        f"number of nan iterations: {0:3d} |",
    ]
    return " | ".join(parts)


def _rounded(tflops: float) -> str:
    """One decimal as in Megatron-LM; three digits for the small values of a CPU."""
    return f"{tflops:.1f}" if tflops >= 10 else f"{tflops:.3g}" if tflops >= 1e-3 else f"{tflops:.7f}"
