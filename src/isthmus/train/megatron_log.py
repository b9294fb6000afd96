"""A step's log line in Megatron-LM's format, for tools that parse its logs."""

from __future__ import annotations

from datetime import datetime

from isthmus.train.metrics import StepMetrics

_NAMES = {"mtp_loss": "mtp_1 loss"}
"""Metrics with another name in Megatron-LM."""


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
    parts += [
        f"learning rate: {m.lr:.6E}",
        f"global batch size: {m.global_batch_size:5d}",
        f"lm loss: {m.loss:.6E}",
    ]
    # Megatron-LM prints every other result of its loss function after the loss, in the same format.
    parts += [f"{_NAMES.get(name, name)}: {value:.6E}" for name, value in m.objective.items()]
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
