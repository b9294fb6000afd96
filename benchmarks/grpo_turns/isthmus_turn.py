"""Runs ``isthmus.grpo`` in the GRPO benchmark."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any, ClassVar

from rounds import turn_files

import isthmus
from grpo_turns import workload
from grpo_turns.workload import Turn
from isthmus.config.load import load_config


class CpuTimes(isthmus.Callback):
    """CPU seconds of this process at the end of each step."""

    ends: ClassVar[list[float]] = []

    def step(self, row: dict[str, Any]) -> None:
        """After a step."""
        self.ends.append(time.process_time())


def run(turn: Turn) -> dict[str, Any]:
    """Train and return the medians of the timed steps."""
    settings = {
        "model": turn.model,
        "data": [turn.prompts],
        "out": "out",
        "data.seq_length": 256,
        "data.valid_fraction": 0.0,
        "train.steps": turn.steps,
        "train.global_batch_size": turn.answers,
        "train.micro_batch_size": turn.micro_batch_size,
        "train.precision": "fp32",
        "rollout.reward": f"{workload.__file__}:reward",
        "rollout.group_size": turn.group_size,
        "rollout.max_new_tokens": turn.new_tokens,
        "rollout.samples_every": None,
        "optim.lr": 1e-6,
        "checkpoint.save_final": False,
        "checkpoint.export_final": False,
        "callbacks": ["grpo_turns.isthmus_turn:CpuTimes"],
        "platform": turn.platform,
    }
    isthmus.grpo(load_config("grpo", None, flags=settings))
    rows = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row][1:]
    from grpo_turns.isthmus_turn import CpuTimes as Watched  # the class that the run has imported

    cpu = [end - start for start, end in zip(Watched.ends, Watched.ends[1:], strict=False)]
    return {
        "step_s": statistics.median(row["step_time_s"] for row in steps),
        "step_cpu_s": statistics.median(cpu),
        "generation_s": statistics.median(row["generation_s"] for row in steps),
        "answer_tokens": statistics.mean(row["answer_tokens"] for row in steps),
        "logp_difference_max": max(row["logp_difference_max"] for row in steps),
    }


if __name__ == "__main__":
    spec, result_file = turn_files()
    result = run(Turn(**spec))
    result["line"] = f"{result['step_s']:.2f} s a step"
    Path(result_file).write_text(json.dumps(result))
