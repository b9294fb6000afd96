"""Runs TRL's GRPOTrainer with transformers' ``generate`` in the GRPO benchmark.

Settings that differ from the defaults: no gradient checkpointing, which costs time; fused AdamW; no reports. One update
on each rollout, with as many answers in a forward pass as Isthmus has.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import datasets
import torch
from rounds import turn_files
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_turns.workload import Turn, reward


class StepTimes(TrainerCallback):
    """Wall and CPU seconds at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []
        self.lengths: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An optimizer step is done."""
        self.ends.append((time.monotonic(), time.process_time()))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Keep the mean length of the answers."""
        if logs and "completions/mean_length" in logs:
            self.lengths.append(float(logs["completions/mean_length"]))


def run(turn: Turn) -> dict[str, Any]:
    """Train and return the medians of the timed steps."""
    config = GRPOConfig(
        output_dir="out",
        use_cpu=turn.platform == "cpu",
        bf16=False,
        per_device_train_batch_size=turn.micro_batch_size,
        gradient_accumulation_steps=turn.answers // turn.micro_batch_size,
        num_generations=turn.group_size,
        max_completion_length=turn.new_tokens,
        max_steps=turn.steps,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(turn.model, dtype=torch.float32, attn_implementation="sdpa")
    records = [json.loads(line) for line in Path(turn.prompts).read_text().splitlines()]
    times = StepTimes()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.Dataset.from_list(records),
        processing_class=AutoTokenizer.from_pretrained(turn.model),
        callbacks=[times],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    steps = [(end[0] - start[0], end[1] - start[1]) for start, end in zip(times.ends, times.ends[1:], strict=False)]
    return {
        "step_s": statistics.median(wall for wall, _ in steps),
        "step_cpu_s": statistics.median(cpu for _, cpu in steps),
        "answer_tokens": statistics.mean(times.lengths[1:]),
    }


if __name__ == "__main__":
    spec, result_file = turn_files()
    result = run(Turn(**spec))
    result["line"] = f"{result['step_s']:.2f} s a step"
    Path(result_file).write_text(json.dumps(result))
