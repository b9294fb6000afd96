"""Runs Isthmus in the GPU benchmarks: the recipe of ``isthmus pretrain`` or ``isthmus sft``, with its own metrics."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import isthmus
from gpu_turns.cases import LEARNING_RATE, Absent, Turn
from gpu_turns.measure import append_run, append_step
from gpu_turns.rows import append


class Steps(isthmus.Callback):
    """Appends a row after each step."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        """After a step."""
        time_s = metrics["step_time_s"]
        flops = metrics["tflops_per_device"] * time_s * 1e12
        values = [metrics[name] for name in ("loss", "grad_norm", "memory_gib")]
        append_step(time_s, metrics["num_tokens"], flops, *values)


def recipe_of(turn: Turn) -> str:
    return "sft" if turn.chats else "pretrain"


def settings(turn: Turn, out: Path) -> dict[str, Any]:
    """The settings of the run: no validation, checkpoint or export."""
    profiled = turn.profiled_steps
    keys = json.loads((Path(turn.weights) / "config.json").read_text())
    tokenizer: dict[str, Any] = {"tokenizer.type": "NullTokenizer", "tokenizer.vocab_size": keys["vocab_size"] - 1}
    if turn.chats:
        tokenizer = {"tokenizer.path": f"{turn.tokens}/model"}
    emulated = {"train.emulate_fp8": True} if turn.dry and turn.precision == "fp8" else {}
    return tokenizer | emulated | {
        "model": turn.weights, "out": str(out), "platform": turn.platform, "data": [f"{turn.tokens}/prepared"],
        "data.seq_length": turn.seq_length, "data.valid_fraction": 0.0, "train.steps": turn.steps + profiled,
        **({"train.profile": f"{turn.steps + 1}-{turn.steps + profiled}"} if profiled else {}),
        "train.global_batch_size": turn.accumulation, "train.precision": turn.precision,
        "optim.lr": LEARNING_RATE, "optim.schedule": "constant", "optim.warmup_fraction": 0.0,
        "checkpoint.save_final": False, "checkpoint.export_final": False, "logging.to": [],
        "callbacks": ["gpu_turns.isthmus_turn:Steps"],
    } | dict(turn.settings)  # fmt: skip


def shares(table: str) -> dict[str, float]:
    """Share of the step by part, from the table that ``train.profile`` writes."""
    cells = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    return {
        row[1]: float(row[3].removesuffix("%")) / 100
        for row in cells
        if len(row) == 7 and row[3].endswith("%") and row[1] != "total"
    }


def run(spec: dict[str, Any]) -> None:
    """Train; the first row has all settings that are not defaults."""
    turn = Turn(**spec)
    from isthmus.config.load import load_config
    from isthmus.platforms.detect import detect
    from isthmus.recipes.run import run_recipe

    if turn.needs and find_spec(turn.needs) is None:
        raise Absent(f"the package {turn.needs} is not installed")
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        out = Path(folder) / "run"
        chosen = settings(turn, out)
        shown = {
            name: value for name, value in chosen.items() if name not in ("model", "out", "data", "tokenizer.path")
        }
        append_run(detect(turn.platform), turn, settings=shown)
        run_recipe(load_config(recipe_of(turn), None, flags=chosen))
        if turn.profiled_steps:
            append("profile", shares=shares((out / "profile" / "rank0.md").read_text()))
