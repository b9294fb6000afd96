"""Asynchronous saves: a run is killed while it writes a checkpoint, resumes, and is compared with one that was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_turns.rows import append

STEPS, EVERY = 12, 3
TIMEOUT_S = 300.0


def command(spec: dict[str, Any], out: Path) -> list[str]:
    """The same for each start."""
    settings = {
        "data.mock": "true", "data.seq_length": 64 if spec["dry"] else 2048, "train.steps": STEPS,
        "train.global_batch_size": 2, "train.precision": "bf16", "optim.lr": 1e-4, "optim.schedule": "constant",
        "checkpoint.every": EVERY, "checkpoint.async": "true", "checkpoint.export_final": "false",
        "checkpoint.save_final": "false", "data.valid_fraction": 0, "platform": spec["platform"],
        "tokenizer.type": "NullTokenizer", "tokenizer.vocab_size": spec["vocab_size"] - 1,
    }  # fmt: skip
    arguments = [sys.executable, "-m", "isthmus", "pretrain", "--model", spec["weights"], "--out", str(out)]
    return [*arguments, *(f"{name}={value}" for name, value in settings.items())]


def run(spec: dict[str, Any]) -> None:
    """Append the largest difference of losses, and at which step the killed run continued."""
    keys = json.loads((Path(spec["weights"]) / "config.json").read_text())
    spec = spec | {"vocab_size": keys["vocab_size"]}
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-", dir=spec["folder"]) as folder:
        undisturbed, killed = Path(folder) / "undisturbed", Path(folder) / "killed"
        expected = _losses(_finish(command(spec, undisturbed), undisturbed))
        append("fact", undisturbed_steps=len(expected))
        step = _kill(command(spec, killed), killed)
        facts = {"killed_after_step": step, "saves_at_kill": sorted(path.name for path in _checkpoints(killed))}
        append("fact", **facts)
        losses = _losses(_finish(command(spec, killed), killed))
        events = [json.loads(line) for line in (killed / "events.jsonl").read_text().splitlines()]
        resumed_at = [row["step"] for row in events if row["event"] == "resume"]
        if not resumed_at or losses.keys() != expected.keys():
            raise RuntimeError(f"the killed run was not resumed: {facts}, steps {sorted(losses)}")
        error = max(abs(losses[k] / expected[k] - 1) for k in expected)
        append("resume", **facts, resumed_at=resumed_at[-1], steps=len(losses), loss_difference=error)


def _checkpoints(out: Path) -> list[Path]:
    """Complete ones and the one that was being written."""
    return [path for path in (out / "checkpoints").glob("*") if path.is_dir()]


def _finish(arguments: list[str], out: Path) -> list[dict[str, Any]]:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments[2:4])} ended with code {done.returncode}: {done.stderr[-1500:]}")
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _losses(rows: list[dict[str, Any]]) -> dict[int, float]:
    """Of each step, as computed last."""
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def _kill(arguments: list[str], out: Path) -> int:
    """Kill the run after the step that follows its second save, which is then being written or has just been."""
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ) as process:
        metrics, deadline_s = out / "metrics.jsonl", time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s and process.poll() is None:
            steps = metrics.read_text().count('"loss"') if metrics.exists() else 0
            if steps >= 2 * EVERY + 1:
                process.kill()
                return steps
            time.sleep(0.001)
        process.kill()
    raise RuntimeError(f"the run ended with code {process.returncode} before step {2 * EVERY + 1}")
