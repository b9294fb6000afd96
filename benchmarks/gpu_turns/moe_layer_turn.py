"""Runs the benchmark of one MoE layer on the GPU, with 16 experts."""

from __future__ import annotations

from typing import Any

import moe_layer

from gpu_turns.rows import append


def run(spec: dict[str, Any]) -> None:
    """Append the rows of ``moe_layer.py`` in bfloat16, one model after the other."""
    options = ["--platform", spec["platform"], "--precision", "bf16", "--tokens", "8192"]
    if spec["dry"]:
        options += ["--quick", "--rounds", "1"]
    for model in ("qwen3_moe",) if spec["dry"] else ("qwen3_moe", "mixtral"):
        for row in moe_layer.measure(moe_layer.parse([*options, "--models", model]))["rows"]:
            append("layer", **row)
