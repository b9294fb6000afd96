"""The end of a log, as ROCm's validation suite reads it."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime

import pytest

from isthmus.config.dialects.rocm_scripts.script_run import summary
from isthmus.train.metrics import StepMetrics, megatron_line

READ_BY_CVS = {
    "throughput": r"throughput per GPU(?:\s*\([^)]*\))?\s*:\s+([0-9\.]+)",
    "tokens": r"tokens\/GPU\/s:\s+([0-9]+)",
    "memory": r"mem usages:\s+([0-9\.]+)",
    "elapsed": r"elapsed time per iteration \(ms\):\s+([0-9\.]+)",
}
"""Patterns that it searches in the last 15 lines."""


def step(number: int, seconds: float) -> StepMetrics:
    return StepMetrics(
        step=number, loss=7.272264, lr=9.999999e-5, grad_norm=1.571, tokens_per_s=1.0, tflops_per_device=590.2 + number,
        memory_gib=1.0, memory_used=0.7494, num_tokens=8, loss_tokens=8, step_time_s=seconds,
        consumed_sequences=256 * number, global_batch_size=256,
    )  # fmt: skip


def test_log_line_is_megatron_lms_with_rocms_memory() -> None:
    now = datetime(2025, 8, 13, 3, 42, 28)
    assert megatron_line(step(50, 10.2358), 50, now) == (
        " [2025-08-13 03:42:28] iteration       50/      50 | consumed samples:        12800 | elapsed time per "
        "iteration (ms): 10235.8 | mem usages: 0.7494 | throughput per GPU (TFLOP/s/GPU): "
        "640.2 | learning rate: 9.999999E-05 | "
        "global batch size:   256 | lm loss: 7.272264E+00 | loss scale: 1.0 | grad norm: 1.571 | number of skipped "
        "iterations:   0 | number of nan iterations:   0 |"
    )


def test_other_loss_metrics_follow_the_loss() -> None:
    line = megatron_line(replace(step(1, 1.0), objective={"mtp_loss": 2.0, "rewards/margins": -0.5}), 2)
    assert "| lm loss: 7.272264E+00 | mtp_1 loss: 2.000000E+00 | rewards/margins: -5.000000E-01 | loss scale" in line


def test_means_exclude_the_first_two_and_the_last_iteration() -> None:
    lines = [
        "layout: tp=1",
        *(megatron_line(step(n, 9.0 if n in (1, 2, 6) else 2.0), 6) for n in range(1, 7)),
        "out  x",
    ]
    end = summary("\n".join(lines), tokens_per_step=128 * 8192, ranks=8)
    assert end == [
        "means over 3 of 6 iterations:",
        f"throughput per GPU: {(593.2 + 594.2 + 595.2) / 3}",
        "elapsed time per iteration: 2000.0",
        "tokens/GPU/s: 65536.000000",
        "mem usages: 0.7494",
    ]
    tail = "\n".join([*lines, *end][-15:])
    matches = {name: re.findall(pattern, tail, re.IGNORECASE) for name, pattern in READ_BY_CVS.items()}
    assert (
        all(matches.values())
        and matches["tokens"] == ["65536"]
        and float(matches["throughput"][-1]) == pytest.approx(594.2)
    )


def test_summary_of_deepseek_and_of_a_short_run() -> None:
    log = "\n".join(megatron_line(step(n, 3.0), 2) for n in (1, 2))
    end = summary(log, tokens_per_step=3, ranks=1, skip=1, with_throughput=False)
    assert end[0] == "means over 2 of 2 iterations:" and not any("throughput" in line for line in end)
    assert summary("nothing ran", tokens_per_step=1, ranks=1) == []
