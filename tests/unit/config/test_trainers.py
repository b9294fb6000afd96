"""Configs of other trainers: each key is mapped to a setting that exists, ignored with a reason, or refused."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
import transformers
from ruamel.yaml import YAML

from isthmus.cli.main import main
from isthmus.config.dialects.trainers.detect import trainer_of
from isthmus.config.dialects.trainers.trainer_config import known_keys
from isthmus.config.dialects.trainers.translate_trainer import Program, translate_trainer
from isthmus.config.dialects.translation import Translation
from isthmus.config.load import load_config
from isthmus.config.setting_errors import dotted, settings, trainers
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
dataset: chats.json,some/alpaca
template: llama3
default_system: Be brief.
enable_thinking: false
cutoff_len: 2048
max_samples: 1000
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
model: Qwen/Qwen3-8B
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

VERL = """
algorithm:
  adv_estimator: grpo
  use_kl_in_reward: false
data:
  train_files: ['gsm8k/train.parquet', 'math/train.parquet']
  val_files: gsm8k/test.parquet
  train_batch_size: 512
  max_prompt_length: 512
  max_response_length: 1024
  filter_overlong_prompts: true
  truncation: error
actor_rollout_ref:
  model:
    path: Qwen/Qwen2-7B-Instruct
    use_remove_padding: true
    enable_gradient_checkpointing: true
  actor:
    strategy: megatron
    optim: {lr: 2.0e-6}
    ppo_mini_batch_size: 128
    ppo_micro_batch_size_per_gpu: 4
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    clip_ratio_low: 0.2
    clip_ratio_high: 0.28
    loss_agg_mode: token-mean
    entropy_coeff: 0
    megatron: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, param_offload: false}
  rollout:
    n: 8
    name: vllm
    temperature: 0.9
    tensor_model_parallel_size: 2
    gpu_memory_utilization: 0.6
    log_prob_micro_batch_size_per_gpu: 8
  ref:
    log_prob_use_dynamic_bsz: true
custom_reward_function: {path: my_rewards.py, name: score}
reward_model:
  overlong_buffer: {enable: true, len: 256, penalty_factor: 1.0}
trainer:
  critic_warmup: 0
  logger: [console, wandb]
  project_name: mine
  experiment_name: first
  n_gpus_per_node: 8
  nnodes: 1
  save_freq: 20
  test_freq: 5
  total_epochs: 15
  device: ${oc.select:global_profiler.tool,null}
"""

TEXTS: dict[Program, str] = {
    "TRL": TRL,
    "LLaMA-Factory": LLAMA_FACTORY,
    "axolotl": AXOLOTL,
    "ms-swift": MS_SWIFT,
    "verl": VERL,
}
VERBS: dict[Program, str] = {
    "TRL": "from-trl",
    "LLaMA-Factory": "from-llamafactory",
    "axolotl": "from-axolotl",
    "ms-swift": "from-swift",
    "verl": "from-verl",
}
SMALLEST: dict[Program, dict[str, Any]] = {
    "TRL": {"model_name_or_path": "m", "dataset_name": "d.json"},
    "LLaMA-Factory": {"model_name_or_path": "m", "dataset": "d.json"},
    "axolotl": {"base_model": "m", "datasets": [{"path": "d.json"}]},
    "ms-swift": {"model": "m", "dataset": ["d.json"]},
    "verl": {
        "actor_rollout_ref.model.path": "m",
        "data.train_files": "d.parquet",
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 8,
        "custom_reward_function.path": "f.py",
    },
}


def translated(program: Program, text: str | dict[str, Any], folder: Path, **options: Any) -> Translation:
    file = folder / "theirs.yaml"
    file.write_text(text if isinstance(text, str) else json.dumps(text))
    translation = translate_trainer(program, file, **options)
    load_config(None, None, [], {"recipe": translation.recipe, **translation.settings}, translation.origins)
    return translation


def refusals(program: Program, text: str | dict[str, Any], folder: Path) -> list[str]:
    with pytest.raises(UsageError) as raised:
        translated(program, text, folder)
    return str(raised.value).splitlines()


def answered(translation: Translation) -> str:
    """All text in which keys are answered."""
    return "\n".join([*translation.origins.values(), *(remark.option for remark in translation.remarks)])


@pytest.mark.parametrize("program", TEXTS)
def test_every_key_of_a_pasted_config_is_answered(program: Program, tmp_path: Path) -> None:
    text = answered(translated(program, TEXTS[program], tmp_path))
    assert [key for key in YAML(typ="safe").load(TEXTS[program]) if key not in text] == []


@pytest.mark.parametrize("program", TEXTS)
@pytest.mark.sweep
def test_every_known_key_is_answered(program: Program, tmp_path: Path) -> None:
    """Also one that is true, and one with a value of a wrong kind."""
    file = tmp_path / "theirs.yaml"
    for key in known_keys(program):
        for value in (True, {"a": 1}):
            file.write_text(json.dumps({**SMALLEST[program], key: value}))
            try:
                text = answered(translate_trainer(program, file))
            except UsageError as error:
                text = str(error)
            assert key in text, key


def test_settings_of_llama_factory(tmp_path: Path) -> None:
    translation = translated("LLaMA-Factory", LLAMA_FACTORY, tmp_path, nproc=2)
    assert translation.recipe == "sft"
    expected = {
        "model.path": "meta-llama/Meta-Llama-3-8B-Instruct",
        "model.trust_remote_code": True,
        "out": "saves/llama3-8b/lora/sft",
        "data.files": ["chats.json", "hf:some/alpaca:train"],
        "data.seq_length": 2048,
        "data.packing": False,
        "data.valid_fraction": 0.1,
        "chat.template": "llama3",
        "chat.system": "Be brief.",
        "chat.reasoning": "drop",
        "lora.rank": 8,
        "lora.alpha": 16.0,
        "lora.targets": ["all-linear"],
        "lora.modules_to_save": ["embed_tokens"],
        "lora.lr_ratio": 16.0,
        "lora.init": "pissa_niter_16",
        "lora.quantize": "nf4",
        "train.micro_batch_size": 1,
        "train.global_batch_size": 16,
        "train.epochs": 3.0,
        "train.precision": "bf16",
        "train.eval_every": 500,
        "train.recompute": "full",
        "train.neftune_alpha": 5.0,
        "train.seed": 42,
        "optim.lr": 1e-4,
        "optim.schedule": "cosine",
        "optim.warmup_fraction": 0.1,
        "optim.beta2": 0.999,
        "checkpoint.every": 500,
        "logging.to": [],
        "parallel.timeout_s": 1e6,
    }
    assert {name: translation.settings.get(name) for name in expected} == expected
    assert translation.world.nproc_per_node == 2


def test_settings_of_axolotl(tmp_path: Path) -> None:
    translation = translated("axolotl", AXOLOTL, tmp_path)
    expected = {
        "model.path": "NousResearch/Llama-3.2-1B",
        "data.files": ["hf:teknium/GPT4-LLM-Cleaned:train"],
        "data.seq_length": 2048,
        "data.packing": True,
        "data.overlong": "drop",
        "data.valid_fraction": 0.1,
        "lora.targets": ["all-linear"],
        "lora.dora": True,
        "lora.quantize": "int8",
        "optim.optimizer": "adamw_8bit",
        "optim.lr": 2e-4,
        "train.global_batch_size": 4,
        "logging.to": ["wandb"],
        "logging.project": "mine",
    }
    assert {name: translation.settings.get(name) for name in expected} == expected
    assert "lora.dropout" not in translation.settings and "checkpoint.every" not in translation.settings


def test_settings_of_trl(tmp_path: Path) -> None:
    translation = translated("TRL", TRL, tmp_path)
    expected = {
        "data.files": ["hf:trl-lib/Capybara:train"],
        "data.valid_files": ["hf:trl-lib/Capybara:test"],
        "data.packing": True,
        "data.seq_length": 1024,
        "lora.rank": 32,
        "lora.alpha": 16.0,
        "lora.targets": ["q_proj", "v_proj"],
        "lora.quantize": "nf4",
        "logging.to": ["trackio"],
        "checkpoint.push": "me/mine",
        "optim.schedule": "linear",
        "optim.optimizer": "adamw_8bit",
        "train.global_batch_size": 16,
    }
    assert {name: translation.settings.get(name) for name in expected} == expected


def test_settings_of_swift(tmp_path: Path) -> None:
    translation = translated("ms-swift", MS_SWIFT, tmp_path)
    expected = {
        "data.files": ["hf:AI-ModelScope/alpaca-gpt4-data-en:train"],
        "data.loss_on": "last",
        "data.overlong": "drop",
        "chat.template": "qwen3",
        "lora.path": "output/checkpoint-1",
        "lora.quantize": "nf4",
        "optim.lr": 1e-4,
        "optim.weight_decay": 0.1,
        "train.global_batch_size": 16,
    }
    assert {name: translation.settings.get(name) for name in expected} == expected
    assert "lora.rank" not in translation.settings
    reasons = {remark.option: remark.reason for remark in translation.remarks}
    assert "ModelScope" in "".join(reasons.values()) and "#500" in reasons


def test_preferences(tmp_path: Path) -> None:
    config = {"model_name_or_path": "m", "dataset": "d.json", "stage": "dpo", "pref_loss": "orpo", "pref_beta": 0.2}
    orpo = translated("LLaMA-Factory", config, tmp_path)
    assert orpo.recipe == "dpo" and (orpo.settings["dpo.loss"], orpo.settings["dpo.beta"]) == ("orpo", 0.2)
    kto = translated("axolotl", {**SMALLEST["axolotl"], "learning_rate": 1e-6, "rl": "kto", "rl_beta": 0.3}, tmp_path)
    assert kto.recipe == "kto" and kto.settings["kto.beta"] == 0.3
    reward = translated("TRL", SMALLEST["TRL"], tmp_path, recipe="reward")
    assert reward.recipe == "reward" and reward.settings["optim.lr"] == 1e-4
    dpo = translated(
        "TRL", {**SMALLEST["TRL"], "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}, tmp_path, recipe="dpo"
    )
    assert dpo.settings["dpo.sft_weight"] == 0.5 and dpo.settings["optim.lr"] == 1e-6
    distill = translated(
        "ms-swift", {**SMALLEST["ms-swift"], "rlhf_type": "gkd", "teacher_model": "t", "lmbda": 0}, tmp_path
    )
    assert distill.recipe == "distill" and distill.settings["distill.teacher"] == "t"
    assert distill.settings["distill.beta"] == 0.5


def test_first_samples_of_llama_factory(tmp_path: Path) -> None:
    settings = translated("LLaMA-Factory", {**SMALLEST["LLaMA-Factory"], "max_samples": 1000}, tmp_path).settings
    assert settings["data.max_samples"] == 1000


def test_warm_up_of_axolotl(tmp_path: Path) -> None:
    """Without a key it is 3% of the steps."""
    config = {**SMALLEST["axolotl"], "learning_rate": 1e-4}
    for keys, setting in (
        ({}, {"optim.warmup_fraction": 0.03}),
        ({"warmup_steps": 0}, {"optim.warmup_steps": 0}),
        ({"warmup_steps": 10}, {"optim.warmup_steps": 10}),
        ({"warmup_steps": 0.1}, {"optim.warmup_fraction": 0.1}),
        ({"warmup_ratio": 0.2}, {"optim.warmup_fraction": 0.2}),
    ):
        settings_ = translated("axolotl", config | keys, tmp_path).settings
        assert {name: value for name, value in settings_.items() if "warmup" in name} == setting


def test_copies_of_a_sharded_model(tmp_path: Path) -> None:
    """HSDP has a number in axolotl, and none in the arguments of transformers."""
    config = {**SMALLEST["axolotl"], "learning_rate": 1e-4, "dp_shard_size": 4}
    one, two = (translated("axolotl", config | {"dp_replicate_size": copies}, tmp_path).settings for copies in (1, 2))
    assert one["parallel.fsdp"] is True and two["parallel.fsdp"] == 4
    hybrid = {**SMALLEST["LLaMA-Factory"], "fsdp": "hybrid_shard auto_wrap"}
    remarks = map(str, translated("LLaMA-Factory", hybrid, tmp_path).remarks)
    assert any("groups of N ranks" in remark for remark in remarks)


def test_names_of_data_sets_are_looked_up(tmp_path: Path) -> None:
    info = {
        "mine": {"file_name": "mine.json"},
        "chats": {"hf_hub_url": "some/chats", "formatting": "sharegpt", "split": "train_sft", "subset": "en"},
        "articles": {"file_name": "a.jsonl", "columns": {"prompt": "question", "response": "answer"}},
        "pictures": {"file_name": "p.json", "columns": {"images": "images"}},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    config = {"model_name_or_path": "m", "dataset": "mine,chats", "dataset_dir": str(tmp_path)}
    files = translated("LLaMA-Factory", config, tmp_path).settings["data.files"]
    assert files == [str(tmp_path / "mine.json"), "hf:some/chats/en:train_sft"]
    mixed = config | {"mix_strategy": "interleave_under", "interleave_probs": "0.75,0.25"}
    sets = translated("LLaMA-Factory", mixed, tmp_path).settings["data.sets"]
    assert [part["weight"] for part in sets.values()] == [0.75, 0.25]
    articles = translated("LLaMA-Factory", config | {"dataset": "articles"}, tmp_path)
    assert articles.settings["data.columns"] == {"instruction": "question", "output": "answer"}
    assert any(
        "'nothing' is not in" in line for line in refusals("LLaMA-Factory", config | {"dataset": "nothing"}, tmp_path)
    )
    assert any(
        "only text is trained" in line for line in refusals("LLaMA-Factory", config | {"dataset": "pictures"}, tmp_path)
    )
    lost = config | {"dataset_dir": "nowhere"}
    assert "--dataset-info" in refusals("LLaMA-Factory", lost, tmp_path)[-1]
    (tmp_path / "theirs.yaml").write_text(json.dumps(lost))
    replaced = translate_trainer("LLaMA-Factory", tmp_path / "theirs.yaml", data=("hf:a/b:train", "c.jsonl"))
    assert replaced.settings["data.files"] == ["hf:a/b:train", "c.jsonl"]


def test_keys_without_an_equal_setting_are_refused_together(tmp_path: Path) -> None:
    lines = refusals(
        "LLaMA-Factory",
        {**SMALLEST["LLaMA-Factory"], "use_galore": True, "rope_scaling": "yarn", "lora_rnak": 8},
        tmp_path,
    )
    assert lines[0] == "the config of LLaMA-Factory has 3 keys without an equal setting:"
    assert lines[1].startswith("  use_galore: true  the optimizers are") and "rope_scaling: yarn" in lines[2]
    assert "lora_rnak" in lines[3] and "did you mean lora_rank?" in lines[3]
    assert translated("LLaMA-Factory", {**SMALLEST["LLaMA-Factory"], "use_galore": False}, tmp_path).recipe == "sft"


def test_another_kind_of_training_is_one_error(tmp_path: Path) -> None:
    (line,) = refusals("ms-swift", {**SMALLEST["ms-swift"], "rlhf_type": "grpo", "num_generations": 8}, tmp_path)
    assert "rlhf_type: grpo  is training on rollouts, which is not translated; see isthmus grpo" in line
    (line,) = refusals("axolotl", {**SMALLEST["axolotl"], "rl": "grpo"}, tmp_path)
    assert "rl: grpo  is training on rollouts" in line


SCRIPT = """
# Two GPUs.
ranks=2
CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=$ranks \\
megatron rlhf --rlhf_type dpo \\
    --model some/model --dataset 'a/b#10' \\
              c.jsonl \\
    --system 'You are
helpful.' --tensor_model_parallel_size 2 --micro_batch_size 4 --global_batch_size $(expr 32 / $ranks) \\
    --lr 1e-5 --recompute_granularity full --sequence_parallel
"""


def test_the_command_of_a_script_is_read_and_not_run(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(f"touch {tmp_path}/ran\n{SCRIPT}")
    translation = translate_trainer("ms-swift", file)
    assert translation.recipe == "dpo" and translation.world.nproc_per_node == 2
    expected = {
        "data.files": ["hf:a/b:train", "c.jsonl"],
        "chat.system": "You are\nhelpful.",
        "parallel.tp": 2,
        "train.micro_batch_size": 4,
        "train.global_batch_size": 16,
        "train.recompute": "full",
        "optim.lr": 1e-5,
        "out": "runs/train",
    }
    assert {name: translation.settings.get(name) for name in expected} == expected
    assert not (tmp_path / "ran").exists()
    file.write_text("echo nothing\n")
    with pytest.raises(UsageError, match="starts no training"):
        translate_trainer("ms-swift", file)


def test_a_mixture_and_options_of_the_launcher(tmp_path: Path) -> None:
    mixture = {"datasets": [{"id": "a/b", "config": "c", "split": "train_sft"}, {"id": "d/e"}], "test_split_size": 0.1}
    config = {"model_name_or_path": "m", "dataset_mixture": mixture, "eval_strategy": "steps", "eval_steps": 5}
    mixed = translated("TRL", config, tmp_path).settings
    assert mixed["data.files"] == ["hf:a/b/c:train_sft", "hf:d/e:train"] and mixed["data.valid_fraction"] == 0.1
    script = tmp_path / "train.sh"
    command = (
        "trl dpo --model_name_or_path m --dataset_name d.json --num_processes 4 --accelerate_config zero3 --no_bf16"
    )
    script.write_text(f"{command} --no_remove_unused_columns\n")
    launched = translate_trainer("TRL", script)
    assert launched.recipe == "dpo" and launched.world.nproc_per_node == 4
    assert launched.settings["parallel.fsdp"] and launched.settings["train.global_batch_size"] == 32
    assert "train.precision" not in launched.settings


@pytest.mark.slow
@pytest.mark.parametrize("program", TEXTS)
def test_a_config_of_another_program_is_recognized(
    program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(TEXTS[program])
    assert main(["sft", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"isthmus: {file} looks like a config of {program}.") and error.count("\n") == 1
    command = error.split("`")[1].partition(" >")[0].split()
    assert command == ["isthmus", "config", VERBS[program], str(file)]
    assert main(command[1:]) == 0
    ours = tmp_path / "ours.yaml"
    ours.write_text(capsys.readouterr().out)
    config = load_config("grpo" if program == "verl" else "sft", ours)
    assert config.model.path == YAML(typ="safe").load(TEXTS[program]).get("model_name_or_path", config.model.path)


def test_settings_of_verl(tmp_path: Path) -> None:
    translation = translated("verl", VERL, tmp_path)
    assert translation.recipe == "grpo" and translation.world.nproc_per_node == 8
    expected = {
        "data.files": ["gsm8k/train.parquet", "math/train.parquet"],
        "data.valid_files": ["gsm8k/test.parquet"],
        "data.seq_length": 1536,
        "data.overlong": "drop",
        "rollout.reward": ["my_rewards.py:score"],
        "rollout.group_size": 8,
        "rollout.max_new_tokens": 1024,
        "rollout.temperature": 0.9,
        "train.global_batch_size": 1024,
        "train.micro_batch_size": 4,
        "grpo.updates_per_rollout": 4,
        "grpo.loss": "dapo",
        "grpo.scale_advantages": "group",
        "grpo.clip_low": 0.2,
        "grpo.clip_high": 0.28,
        "grpo.kl_weight": 0.001,
        "grpo.kl_estimator": "k3",
        "grpo.kl_ratio": False,
        "grpo.length_penalty_tokens": 256,
        "parallel.tp": 2,
        "parallel.pp": 2,
        "optim.lr": 2e-6,
        "optim.weight_decay": 0.01,
        "checkpoint.every": 80,
        "train.eval_every": 20,
        "train.epochs": 15.0,
        "logging.to": ["wandb"],
    }
    assert {name: translation.settings.get(name) for name in expected} == expected
    assert "parallel.fsdp" not in translation.settings and "parallel.vpp" not in translation.settings


def test_the_estimator_of_a_divergence_without_weight_is_left_out(tmp_path: Path) -> None:
    divergence = {"use_kl_loss": True, "kl_loss_coef": 0.0, "kl_loss_type": "mse"}
    actor = {f"actor_rollout_ref.actor.{name}": value for name, value in divergence.items()}
    settings = translated("verl", {**SMALLEST["verl"], **actor}, tmp_path).settings
    assert settings["grpo.kl_weight"] == 0 and not {"grpo.kl_estimator", "grpo.kl_ratio"} & settings.keys()


VERL_SCRIPT = """
set -x
files="['a.parquet', 'b.parquet']"
python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml \\
    algorithm.adv_estimator=grpo data.train_files="$files" data.train_batch_size=64 +data.seed=7 \\
    actor_rollout_ref.model.path=m actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.clip_ratio_low=3e-4 \\
    custom_reward_function.path=r.py trainer.total_training_steps=10 trainer.logger='["console"]' $@ 2>&1 | tee log
"""


@pytest.mark.processes
def test_the_overrides_of_verl_are_read(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(VERL_SCRIPT)
    settings = translate_trainer("verl", file).settings
    expected = {
        "data.files": ["a.parquet", "b.parquet"],
        "data.seed": 7,
        "grpo.loss": "gspo",
        "grpo.clip_low": 3e-4,
        "rollout.reward": ["r.py:compute_score"],
        "train.global_batch_size": 256,
        "train.steps": 10,
    }
    assert {name: settings.get(name) for name in expected} == expected
    assert "parallel.fsdp" not in settings and "grpo.kl_weight" not in settings


VERL_ARRAYS = r"""#!/usr/bin/env bash
set -xeuo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
mkdir -p logs
DATA=(
    algorithm.adv_estimator=grpo
    data.train_files="['$HOME/a b.parquet']"
)
EXTRA=()
case "${DEVICE}" in
    gpu) EXTRA+=(actor_rollout_ref.rollout.n=$((2 * 4))) ;;
    npu) EXTRA+=(actor_rollout_ref.rollout.n=16) ;;
esac
if [ "${#EXTRA[@]}" -gt 0 ]; then DATA+=("data.max_response_length=2048"); fi
ray job submit --no-wait -- python3 -m verl.trainer.main_ppo \
    "${DATA[@]}" actor_rollout_ref.model.path="$MODEL_PATH" "${EXTRA[@]}" \
    trainer.experiment_name=a_$(date +%Y) "$@" 2>&1 | tee "logs/$(date +%H).log"
"""


@pytest.mark.processes
def test_a_script_of_verl_runs_with_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "train.sh"
    file.write_text(VERL_ARRAYS)
    translation = translate_trainer("verl", file)
    expected = {
        "model.path": "Qwen/Qwen3-8B",
        "data.files": ["/home/me/a b.parquet"],
        "rollout.group_size": 8,
        "rollout.max_new_tokens": 2048,
        "logging.name": f"a_{datetime.now():%Y}",
    }
    assert {name: translation.settings.get(name) for name in expected} == expected
    assert any(remark.option.startswith("line 3: DEVICE=") for remark in translation.remarks)
    assert [path.name for path in tmp_path.iterdir()] == ["train.sh"]


@pytest.mark.parametrize(("mode", "is_reported"), [("R3", True), ("disabled", False)])
def test_a_replay_of_routers_of_verl_is_reported(mode: str, is_reported: bool, tmp_path: Path) -> None:
    text = VERL.replace("strategy: megatron", f"strategy: megatron\n    router_replay: {{mode: {mode}}}")
    remarks = translated("verl", text, tmp_path).remarks
    reported = [remark for remark in remarks if "router_replay" in remark.option]
    assert any("without a replay" in str(remark) for remark in reported) is is_reported


@pytest.mark.parametrize("part", ["megatron", "fsdp_config"])
@pytest.mark.parametrize("value", [True, False])
def test_an_optimizer_state_on_the_host_of_verl(part: str, value: bool, tmp_path: Path) -> None:
    """verl moves the state of the actor to the host after an update, and back before the next one."""
    other = "critic: {megatron: {optimizer_offload: true}}\n"
    strategy = "megatron" if part == "megatron" else "fsdp2"
    text = VERL.replace("strategy: megatron", f"strategy: {strategy}\n    {part}: {{optimizer_offload: {value}}}")
    text = "\n".join(line for line in text.splitlines() if "param_offload" not in line)
    settings = translated("verl", text + "\n" + other, tmp_path).settings
    assert settings.get("rollout.offload", False) is value


@pytest.mark.processes
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cat > x.py", r"x\.py: restricted(?s:.*)Give the config that Hydra wrote"),
        ("N=$(python3 -c 'print(2)' 2>/dev/null)", r"/dev/null: restricted(?s:.*)Give the config that Hydra wrote"),
        ("exit 3", r"started no training run \(python -m verl\.trainer\.main_ppo\)\. It ended with exit code 3"),
        ("python3 -m verl.trainer.main_ppo data.seed=1", r"starts 2 training runs\. Give the config that Hydra wrote"),
    ],
)
def test_a_script_of_verl_is_refused(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(f"{line}\n{VERL_SCRIPT}")
    with pytest.raises(UsageError, match=message):
        translate_trainer("verl", file)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("algorithm.adv_estimator", "gae", "is not of Isthmus; use grpo"),
        ("actor_rollout_ref.rollout.n", 1, "must be 2 or more"),
        ("actor_rollout_ref.actor.ppo_epochs", 2, "an answer is trained on once"),
        ("data.train_batch_size", 1000, "is not a multiple of actor_rollout_ref.actor.ppo_mini_batch_size=256"),
        ("actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-sum", "is not a mean of Isthmus"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "clip_cov", "is not a loss of grpo"),
        ("algorithm.use_kl_in_reward", True, "is a part of the loss"),
        ("actor_rollout_ref.rollout.top_k", 50, "tokens are drawn by"),
        ("actor_rollout_ref.rollout.multi_turn.enable", True, "without calls of tools"),
        ("algorithm.rollout_correction.rollout_rs", "token_k1", "not rejected by a statistic"),
        ("actor_rollout_ref.actor.ppo_mini_batch_sise", 8, "did you mean actor_rollout_ref.actor.ppo_mini_batch_size?"),
    ],
)
def test_what_only_verl_has_is_refused(key: str, value: Any, why: str, tmp_path: Path) -> None:
    lines = refusals("verl", {**SMALLEST["verl"], key: value}, tmp_path)
    assert len(lines) == 2 and key in lines[1] and why in lines[1]


def test_a_few_wrong_keys_are_answered_one_by_one(tmp_path: Path) -> None:
    assert trainer_of({"learning_rate": 1, "bf16": True, "model": "m"}) is None
    assert trainer_of({"train": {"steps": 1}, **dict.fromkeys(("bf16", "tf32", "seed", "fp16", "stage"), 1)}) is None
    file = tmp_path / "mine.yaml"
    file.write_text("model: m\nlearning_rate: 1e-4\ntf32: true\n")
    with pytest.raises(UsageError) as raised:
        load_config("sft", file)
    assert "learning_rate  is not a setting (did you mean optim.lr?)" in str(raised.value)
    assert "tf32  is not a setting: matmuls of fp32 are exact" in str(raised.value)


def test_settings_on_the_command_line_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(TRL)
    assert (
        main(
            [
                "config",
                "from-trl",
                str(file),
                "optim.lr=3e-5",
                "train.steps=7",
                "--data",
                "mine.jsonl",
                "--nproc",
                "4",
                "--json",
            ]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert result["config"]["optim"]["lr"] == 3e-5 and result["config"]["data"]["files"] == ["mine.jsonl"]
    assert result["config"]["train"]["global_batch_size"] == 64
    assert result["config"]["train"]["steps"] == 7 and "epochs" not in result["config"]["train"]
    assert result["command"] == "isthmus sft run.yaml --nproc 4"


def test_answers_are_settings() -> None:
    known = {dotted(key) for key in settings()}
    for table in trainers().values():
        for answer in table.values():
            name = answer.partition(", ")[0]
            assert name in known or name in ("no", "out", "recipe") or name.startswith("--")
    assert set(VERBS) == set(get_args(Program))


def test_every_setting_of_trl_has_an_answer() -> None:
    """Read from the sources: importing TRL takes seconds."""
    trl = find_spec("trl")
    if trl is None or trl.origin is None:
        pytest.skip("TRL is not installed (extra: bench)")
    names = ("base", "model", "sft", "dpo", "kto", "reward", "grpo", "rloo")
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
