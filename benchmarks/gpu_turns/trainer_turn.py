"""Runs transformers' Trainer or TRL's SFTTrainer in the GPU benchmarks, on the tokens of the other contestants.

Settings that differ from the defaults: bf16 over float32 weights, fused AdamW, torch.compile, no gradient
checkpointing, evaluation, checkpoints or reports. TRL's default is not compiled; here it is, like the others.
"""

from __future__ import annotations

import json
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gpu_turns.cases import LEARNING_RATE, Absent, Turn
from gpu_turns.measure import append_run, append_step
from gpu_turns.torch_turn import flash_attention


def arguments(turn: Turn, out: str) -> dict[str, Any]:
    """Arguments of both trainers."""
    return {
        "output_dir": out,
        "use_cpu": turn.platform == "cpu",
        "bf16": True,
        "torch_compile": True,
        "torch_compile_backend": "eager" if turn.dry else "inductor",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": turn.accumulation,
        "max_steps": turn.steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def samples(turn: Turn) -> list[dict[str, list[int]]]:
    """Each micro batch as a sample. Both trainers shift the labels, so that the last token has none.

    With its label as one more token, matmuls would have odd sizes.
    """
    rows = []
    for step in torch.load(Path(turn.tokens) / "steps.pt")[: turn.steps]:
        for micro in step:
            tokens = micro["ids"].tolist()
            rows.append({"input_ids": tokens, "labels": [-100, *tokens[1:]]})
    return rows


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """All samples have the same length."""
    return {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}


def run(spec: dict[str, Any]) -> None:
    """Train."""
    turn = Turn(**spec)
    needed = ("accelerate", *(("trl", "datasets") if turn.model == "trl" else ()))
    if missing := [name for name in needed if find_spec(name) is None]:
        raise Absent(f"not installed: {', '.join(missing)}")
    from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from isthmus.families.registry import family_for
    from isthmus.platforms.detect import detect
    from isthmus.platforms.environment import apply_env
    from isthmus.train.flops import flops_per_batch

    platform = detect(turn.platform)
    apply_env(platform)
    platform.prepare_process()
    config = json.loads((Path(turn.weights) / "config.json").read_text())
    arch = family_for(config).to_architecture(config)
    tokens = turn.accumulation * turn.seq_length
    # Trainer's loss is over all but the first token of a sample: as many as Isthmus has ids.
    flops = flops_per_batch(arch, tokens, turn.accumulation * turn.seq_length**2, tokens)
    attention = "sdpa" if turn.platform == "cpu" else flash_attention()
    append_run(platform, turn, attention=attention)

    class Rows(TrainerCallback):
        started_s = time.perf_counter()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started_s = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            if logs and "loss" in logs:  # the loss is on the host, so the device has finished
                time_s = time.perf_counter() - self.started_s
                append_step(time_s, tokens, flops, logs["loss"], logs["grad_norm"], platform.memory_gib())

    model: Any = AutoModelForCausalLM.from_pretrained(turn.weights, dtype=torch.float32, attn_implementation=attention)
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        trainer: Trainer
        if turn.model == "trl":
            import datasets
            from transformers import AutoTokenizer
            from trl import SFTConfig, SFTTrainer

            data = datasets.Dataset.from_list(samples(turn))
            sft = SFTConfig(**arguments(turn, folder), max_length=None, packing=False)
            tokenizer = AutoTokenizer.from_pretrained(turn.weights)
            trainer = SFTTrainer(model=model, args=sft, train_dataset=data, processing_class=tokenizer)
        else:
            options = TrainingArguments(**arguments(turn, folder))
            trainer = Trainer(model=model, args=options, train_dataset=samples(turn), data_collator=collate)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Rows())
        trainer.train()
