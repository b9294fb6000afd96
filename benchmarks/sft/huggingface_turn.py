"""Runs transformers' Trainer or TRL's SFTTrainer in the fine-tuning benchmark, on samples and masks from Isthmus.

Styles of the Trainer: ``padded`` (to the longest sample of the micro batch), ``grouped`` (padded, samples of similar
length together), ``flattened`` (transformers' own padding-free collator). Styles of TRL: ``trl`` (padded),
``trl-flattened`` (its padding-free mode) and ``trl-packed`` (its best-fit-decreasing packing).
Settings that differ from the defaults: no gradient checkpointing, which costs time (TRL's default has it); PyTorch's
SDPA, the fastest attention that both have on a CPU; fused AdamW; no evaluation, checkpoints or reports.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import torch
from rounds import turn_files
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DataCollatorWithFlattening,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from sft.clock import Clock
from sft.workload import Turn

IGNORED = -100


class ClockCallback(TrainerCallback):
    """Reports the end of each step to the clock, and stops the training when enough is timed."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.num_tokens = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An optimizer step is done."""
        self.clock.step_done(self.num_tokens)
        self.num_tokens = 0
        control.should_training_stop = self.clock.enough

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Keep the loss of each step."""
        if logs and "loss" in logs:
            self.clock.losses.append(float(logs["loss"]))


def counting(trainer: type[Trainer]) -> type[Trainer]:
    """The same trainer, with a count of the tokens without padding."""

    class Counting(trainer):  # type: ignore[valid-type, misc]
        callback: ClockCallback

        def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
            """Count the tokens, then run the step."""
            mask = inputs.get("attention_mask")
            self.callback.num_tokens += int(inputs["input_ids"].numel() if mask is None else mask.sum())
            loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
            return loss

    return Counting


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A micro batch padded to its longest sample; padding has no attention and no loss."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def rows(key: str, filler: int) -> torch.Tensor:
        return torch.tensor([sample[key] + [filler] * (longest - len(sample[key])) for sample in samples])

    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    seen = (torch.arange(longest)[None] < lengths[:, None]).long()
    return {"input_ids": rows("input_ids", 0), "labels": rows("labels", IGNORED), "attention_mask": seen}


def labelled_samples(turn: Turn) -> datasets.Dataset:
    """The samples with labels for transformers: not shifted, -100 for tokens without loss."""
    store = turn.samples()
    rows = []
    for index in range(len(store)):
        tokens, mask = store[index]
        labels = [token if in_loss else IGNORED for token, in_loss in zip(tokens.tolist(), mask.tolist(), strict=True)]
        rows.append({"input_ids": tokens.tolist(), "labels": labels})
    return datasets.Dataset.from_list(rows)


def settings(turn: Turn) -> dict[str, Any]:
    """Arguments of both trainers."""
    return {
        "output_dir": "out",
        "use_cpu": True,
        "bf16": turn.precision == "bf16",
        "per_device_train_batch_size": turn.micro_batch_size,
        "gradient_accumulation_steps": turn.accumulation,
        "max_steps": 10000,
        "learning_rate": turn.lr,
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


def make_trainer(turn: Turn, model: Any) -> Trainer:
    """The contestant, ready to train."""
    if turn.style.startswith("trl"):
        from transformers import AutoTokenizer
        from trl import SFTConfig, SFTTrainer

        arguments = settings(turn)
        packed = turn.style == "trl-packed"
        if packed:  # its bins are sorted by length; random order, like ours
            arguments["train_sampling_strategy"] = "random"
        config = SFTConfig(
            **arguments,
            max_length=turn.seq_length if packed else None,  # no sample is longer
            packing=packed,
            padding_free=turn.style != "trl",
        )
        return counting(SFTTrainer)(
            model=model,
            args=config,
            train_dataset=labelled_samples(turn),
            processing_class=AutoTokenizer.from_pretrained(turn.model),
        )
    arguments = settings(turn)
    if turn.style == "grouped":
        arguments["train_sampling_strategy"] = "group_by_length"
    collate = DataCollatorWithFlattening() if turn.style == "flattened" else pad
    return counting(Trainer)(
        model=model, args=TrainingArguments(**arguments), train_dataset=labelled_samples(turn), data_collator=collate
    )


def run(turn: Turn) -> dict[str, Any]:
    """Train and return the result of the run."""
    adapted = turn.lora_rank is not None
    # Frozen weights need no float32 copy: PEFT makes the adapters float32.
    dtype = torch.bfloat16 if adapted and turn.precision == "bf16" else torch.float32
    quantized: dict[str, Any] = {}
    if turn.quantize is not None:
        bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
        quantized["quantization_config"] = BitsAndBytesConfig(
            **bits if turn.quantize == "nf4" else {"load_in_8bit": True}
        )
    model: Any = AutoModelForCausalLM.from_pretrained(turn.model, dtype=dtype, attn_implementation="sdpa", **quantized)
    if adapted:
        from peft import LoraConfig, get_peft_model

        lora = {"r": turn.lora_rank, "lora_alpha": 2 * turn.lora_rank, "target_modules": "all-linear"}
        model = get_peft_model(model, LoraConfig(**lora, task_type="CAUSAL_LM"))
    trainer: Any = make_trainer(turn, model)
    trainer.remove_callback(PrinterCallback)
    callback = ClockCallback(Clock(turn))
    trainer.callback = callback
    trainer.add_callback(callback)
    trainer.train()
    if model.is_gradient_checkpointing or next(model.parameters()).dtype != dtype:
        raise RuntimeError("the contestant did not train with the given settings")
    return callback.clock.result()


if __name__ == "__main__":
    spec, result_file = turn_files()
    result = run(Turn(**spec))
    Path(result_file).write_text(json.dumps(result))
