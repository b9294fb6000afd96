"""Configs of other trainers are answered key by key: a setting of ours that exists, or why there is none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers
from ruamel.yaml import YAML

from isthmus.config.load import load_config
from isthmus.config.setting_errors import settings, trainers
from isthmus.errors import UsageError

TRL = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: trl-lib/Capybara
learning_rate: 2.0e-4
num_train_epochs: 1
packing: true
max_length: 1024
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
optim: adamw_8bit
neftune_noise_alpha: 5
eos_token: <|im_end|>
chat_template_path: chat.jinja
eval_strategy: steps
eval_steps: 100
use_peft: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
lora_modules_to_save: [lm_head]
lora_task_type: CAUSAL_LM
use_rslora: true
load_in_4bit: true
bnb_4bit_quant_type: nf4
use_bnb_nested_quant: true
bf16: true
report_to: trackio
push_to_hub: true
hub_model_id: me/mine
seed: 42
output_dir: runs/lora
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_alpha: 16
lora_target: all
additional_target: embed_tokens
loraplus_lr_ratio: 16
pissa_init: true
quantization_bit: 4
quantization_method: bnb
double_quantization: true
dataset: identity,alpaca_en_demo
template: llama3
default_system: Be brief.
enable_thinking: false
cutoff_len: 2048
max_samples: 1000
rope_scaling: yarn
neftune_noise_alpha: 5
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 500
"""
AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: true
load_in_4bit: false
strict: false
chat_template: llama3
default_system_message: Be brief.
datasets: [{path: teknium/GPT4-LLM-Cleaned, type: alpaca}]
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: ./outputs/lora-out
adapter: lora
lora_model_dir:
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
pad_to_sequence_len: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_fan_in_fan_out:
lora_target_modules: [gate_proj, q_proj]
lora_target_linear: true
peft_use_dora: true
neftune_noise_alpha: 5
wandb_project: mine
wandb_entity:
wandb_watch:
wandb_name:
wandb_log_model:
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
group_by_length: false
bf16: auto
tf32: false
gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
flash_attention: true
loss_watchdog_threshold: 5.0
loss_watchdog_patience: 3
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens: {pad_token: <|end_of_text|>}
"""
MS_SWIFT = """
train_type: lora
dataset: ['AI-ModelScope/alpaca-gpt4-data-en#500']
torch_dtype: bfloat16
num_train_epochs: 1
per_device_train_batch_size: 1
per_device_eval_batch_size: 1
learning_rate: 1e-4
lora_rank: 8
lora_alpha: 32
lora_dropout: 0.05
target_modules: all-linear
modules_to_save: [lm_head]
adapters: [output/checkpoint-1]
quant_bits: 4
quant_method: bnb
gradient_accumulation_steps: 16
eval_steps: 50
save_steps: 50
save_total_limit: 2
logging_steps: 5
max_length: 2048
output_dir: output
template: qwen3
system: You are a helpful assistant.
loss_scale: last_round
warmup_ratio: 0.05
dataloader_num_workers: 4
model_author: swift
model_name: swift-robot
"""


@pytest.mark.parametrize(
    ("program", "text"), [("TRL", TRL), ("LLaMA-Factory", LLAMA_FACTORY), ("axolotl", AXOLOTL), ("ms-swift", MS_SWIFT)]
)
def test_every_key_of_a_pasted_lora_config_is_answered(program: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "lora.yaml"
    file.write_text(text)
    pasted = YAML(typ="safe").load(text)
    with pytest.raises(UsageError) as raised:
        load_config("sft", file, [], {})
    lines = str(raised.value).splitlines()
    known = {".".join(key) for key in settings()}
    answers = trainers()[program] | trainers()["common"]
    for key in pasted:
        (line,) = (line for line in lines if f"  {key}  " in line)
        if key == "optim":  # the name of a section of ours
            assert "is a section, with settings such as optim.optimizer; got 'adamw_8bit'" in line
            continue
        answer, _, why = answers[key].partition(", ")
        if answer == "no":
            assert line.endswith(f"is not a setting: {why}")
        else:
            assert answer in known or answer.startswith("--") or answer == "out"
            assert line.endswith(f"is not a setting (did you mean {answers[key]}?)")


def test_every_setting_of_trl_has_an_answer() -> None:
    """Read from the sources: importing TRL takes seconds."""
    trl = find_spec("trl")
    if trl is None or trl.origin is None:
        pytest.skip("TRL is not installed (extra: bench)")
    names = ("base", "model", "sft", "dpo", "kto", "reward")
    files = [Path(trl.origin).parent / "trainer" / f"{name}_config.py" for name in names]
    files += [Path(transformers.__file__).parent / "training_args.py"]
    fields = {name for file in files for name in fields_of(file)}
    assert len(fields) > 150
    answered = trainers()["common"].keys() | trainers()["TRL"].keys()
    assert sorted(fields - answered) == []


def fields_of(file: Path) -> Iterator[str]:
    """Names of the fields of the dataclasses in a file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id
