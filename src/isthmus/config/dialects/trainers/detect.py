"""Recognizes a config of another trainer by its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.config.schema import RunConfig
from isthmus.config.setting_errors import trainers

_SIGNS: Mapping[str, list[str]] = {
    "LLaMA-Factory": "stage finetuning_type cutoff_len lora_target template dataset_dir pref_beta".split(),
    "axolotl": "base_model sequence_len micro_batch_size adapter num_epochs sample_packing val_set_size".split(),
    "ms-swift": "tuner_type train_type split_dataset_ratio rlhf_type target_modules torch_dtype".split(),
    "TRL": "dataset_name use_peft lora_target_modules max_length dataset_train_split lora_r".split(),
}
"""Keys that tell the programs apart."""
_COMMANDS = {
    "LLaMA-Factory": "from-llamafactory",
    "axolotl": "from-axolotl",
    "ms-swift": "from-swift",
    "TRL": "from-trl",
    "verl": "from-verl",
}
_FEWEST = 4
"""Keys of other programs that a config has at least; fewer are more likely mistakes in one of ours."""


def trainer_of(values: Mapping[str, Any]) -> str | None:
    """The program whose config has these keys; None if it is one of Isthmus, which has sections."""
    if "actor_rollout_ref" in values:
        return "verl"
    flat = [name for name, value in values.items() if name not in RunConfig.model_fields]
    sections = [name for name in values if name in RunConfig.model_fields and isinstance(values[name], dict)]
    if len(flat) < _FEWEST or sections:
        return None
    counts = {
        program: (
            sum(name in values for name in signs),
            sum(name in trainers()[program] or name in trainers()["common"] for name in flat),
        )
        for program, signs in _SIGNS.items()
    }
    program = max(counts, key=lambda name: counts[name])
    return program if counts[program][1] >= max(_FEWEST, len(flat) // 2) else None


def translation_command(program: str, file: str) -> str:
    """The command that translates a config of ``program``."""
    return f"isthmus config {_COMMANDS[program]} {file}"
