"""Runs Isthmus in the GPU benchmarks: the recipe of ``isthmus pretrain`` or ``isthmus sft``, with its own metrics."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rounds import turn_files

from gpu_turns.cases import Turn
from gpu_turns.measure import Step, row


class FirstRow(threading.Thread):
    """Notes the time of the first row of a file: the end of the first step."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.path, self.at_s, self._done = path, 0.0, threading.Event()

    def run(self) -> None:
        """Wait for the row."""
        while not self._done.wait(0.01):
            if self.path.exists() and self.path.stat().st_size:
                self.at_s = time.time()
                return

    def __enter__(self) -> FirstRow:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()


def settings(turn: Turn, out: Path) -> dict[str, Any]:
    """The settings of the run: no validation, checkpoint or export."""
    timed = turn.warmup_steps + turn.timed_steps
    data: dict[str, Any] = {"data": [f"{turn.folder}/prepared"]} if turn.chats else {"data.mock": True}
    emulated = {"train.emulate_fp8": True} if turn.dry and turn.precision == "fp8" else {}
    return data | emulated | {
        "model": str(turn.model_folder), "out": str(out), "platform": turn.platform,
        "data.seq_length": turn.seq_length, "data.valid_fraction": 0.0,
        "train.steps": timed + turn.profiled_steps, "train.profile": f"{timed + 1}-{timed + turn.profiled_steps}",
        "train.global_batch_size": turn.accumulation, "train.precision": turn.precision,
        "optim.lr": 1e-5, "optim.schedule": "constant",
        "checkpoint.save_final": False, "checkpoint.export_final": False, "logging.to": [],
    }  # fmt: skip


def shares(table: str) -> dict[str, float]:
    """Share of the step by part, from the table that ``train.profile`` writes."""
    cells = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    return {
        row[1]: float(row[3].removesuffix("%")) / 100
        for row in cells
        if len(row) == 7 and row[3].endswith("%") and row[1] != "total"
    }


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Train and return the row; ``settings`` are all others than the defaults."""
    turn = Turn(**spec)
    from isthmus.config.load import load_config
    from isthmus.platforms.detect import detect
    from isthmus.recipes import run as recipes

    recipe = "sft" if turn.chats else "pretrain"
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        out = Path(folder) / "run"
        chosen = settings(turn, out)
        with FirstRow(out / "metrics.jsonl") as first:
            recipes.run_recipe(load_config(recipe, None, flags=chosen))
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        profile = shares((out / "profile" / "rank0.md").read_text())
    steps = [
        Step(
            item["step_time_s"],
            item["num_tokens"],
            item["tflops_per_device"] * item["step_time_s"] * 1e12,
            item["loss"],
        )
        for item in rows
    ]
    timed = slice(turn.warmup_steps, turn.warmup_steps + turn.timed_steps)
    result = row(
        steps[timed], detect(turn.platform), turn.precision, first.at_s - turn.started_s, rows[timed][-1]["memory_gib"]
    )
    remaining = {name: value for name, value in chosen.items() if name not in ("model", "out", "data")}
    return result | {"first_loss": steps[0].loss, "settings": remaining, "profile": profile}


if __name__ == "__main__":
    spec, result_file = turn_files()
    result_file.write_text(json.dumps(run(spec)))
