"""Runs the benchmark of one MoE layer on the GPU, with 16 experts."""

from __future__ import annotations

import json
from typing import Any

import moe_layer
from rounds import turn_files


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """The result of ``moe_layer.py`` in bfloat16."""
    arguments = ["--platform", spec["platform"], "--precision", "bf16", "--tokens", "8192"]
    if spec["dry"]:
        arguments += ["--quick", "--rounds", "1", "--models", "qwen3_moe"]
    return moe_layer.measure(moe_layer.parse(arguments))


if __name__ == "__main__":
    spec, result_file = turn_files()
    result_file.write_text(json.dumps(run(spec)))
