"""Megatron-LM's arguments become exactly these settings, and options without a setting are reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from isthmus.config.dialects.megatron.arguments import read_flags
from isthmus.config.dialects.megatron.known_args import ARGUMENTS, NEVER, SETTINGS, TABLES
from isthmus.config.dialects.megatron.model_args import rows_by_name
from isthmus.config.dialects.megatron.training_command import read_command
from isthmus.config.dialects.megatron.translate_megatron import (
    MegatronTranslation,
    translate_arguments,
    translate_command,
)
from isthmus.config.dialects.translation import Translation, World
from isthmus.errors import UsageError
from unit.config.dialects.examples import DEEPSEEK_V2_LITE, GPT_345M, LLAMA3_8B, MIXTRAL

_ADAM = {"optim.clip_grad": 1.0, "optim.beta1": 0.9, "optim.eps": 1e-8}
_SEEDS = {"data.seed": 1234, "train.seed": 1234}
_DROPOUT = {"train.attention_dropout": 0.0, "train.hidden_dropout": 0.0}
_DOCUMENTS = dict.fromkeys(("data.reset_attention_mask", "data.reset_position_ids", "data.eod_mask_loss"), False)
ENOUGH = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 10 --lr 1e-4 --vocab-size 99 --hidden-dropout 0 "
    "--attention-dropout 0 --mock-data"
).split()


def translated(words: Sequence[str], more: Sequence[str] = (), name: str = "megatron") -> MegatronTranslation:
    return translate_command(read_command(words), more, name)


def statuses(translation: Translation) -> dict[str, str]:
    return {remark.option: remark.status for remark in translation.remarks}


def test_a_dense_model() -> None:
    command = read_command(LLAMA3_8B)
    result = translate_command(replace(command, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}))
    assert result.translation.settings == _ADAM | _SEEDS | _DROPOUT | _DOCUMENTS | {
        "out": "checkpoints/llama3",
        "tokenizer.path": "meta-llama/Meta-Llama-3-8B",
        "tokenizer.type": "HuggingFaceTokenizer",
        "data.seq_length": 8192,
        "data.sets": {
            "web": {"files": ["data/web_text_document"], "weight": 0.7},
            "code": {"files": ["data/code_text_document"], "weight": 0.3},
        },
        "data.valid_fraction": 0.01,
        "parallel.tp": 2,
        "parallel.cp": 2,
        "parallel.sp": True,
        "parallel.overlap_grad_reduce": True,
        "parallel.overlap_param_gather": True,
        "train.micro_batch_size": 1,
        "train.global_batch_size": 128,
        "train.steps": 1000,
        "train.eval_every": 100,
        "train.precision": "bf16",
        "train.profile": "5-6",
        "optim.lr": 0.00015,
        "optim.min_lr": 1e-5,
        "optim.weight_decay": 0.1,
        "optim.beta2": 0.95,
        "optim.schedule": "cosine",
        "optim.warmup_steps": 10,
        "checkpoint.every": 500,
        "checkpoint.resume": "auto",
        "logging.every": 10,
    }
    assert result.translation.world == World(nproc_per_node=8)
    assert result.translation.origins["train.steps"] == "--train-samples 128000 --global-batch-size 128"
    assert statuses(result.translation) == {
        "--use-mcore-models": "different",
        "--use-distributed-optimizer": "different",
        "--eval-iters 32": "different",
        "--save-interval 500": "different",
        "--load checkpoints/llama3": "different",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1": "different",
    }
    again = translated(LLAMA3_8B, ["--save", "mine", "--tensor-model-parallel-size", "4"]).translation
    assert (again.settings["out"], again.settings["parallel.tp"]) == ("mine", 4)


def test_experts_over_two_machines() -> None:
    result = translated(MIXTRAL, name="mixtral")
    assert result.translation.settings == _ADAM | _SEEDS | _DROPOUT | _DOCUMENTS | {
        "out": "runs/mixtral",
        "tokenizer.path": "/models/mixtral-8x7b/tokenizer.model",
        "tokenizer.type": "Llama2Tokenizer",
        "data.seq_length": 4096,
        "data.files": ["/data/a", "/data/b"],
        "data.valid_files": ["/data/valid"],
        "parallel.pp": 4,
        "parallel.vpp": 2,
        "parallel.ep": 4,
        "moe.dispatcher": "alltoall",
        "moe.z_loss": 0.001,
        "moe.aux_loss": 0.01,
        "train.micro_batch_size": 1,
        "train.global_batch_size": 256,
        "train.steps": 1000,
        "train.precision": "bf16",
        "train.recompute": "full",
        "train.recompute_layers": 2,
        "optim.lr": 1e-4,
        "optim.min_lr": 1e-5,
        "optim.weight_decay": 0.01,
        "optim.beta2": 0.999,
        "optim.schedule": "cosine",
        "optim.warmup_steps": 500,
        "optim.schedule_steps": 320000,
        "checkpoint.save_final": False,
        "checkpoint.resume": "never",
        "logging.every": 100,
    }
    assert result.translation.world == World(2, 1, 8, "node0", 6000)
    assert statuses(result.translation) == {
        "--no-masked-softmax-fusion, --moe-grouped-gemm": "different",
        "--load /checkpoints/mixtral --finetune": "unsupported",
        "--ckpt-format torch": "different",
    }


def test_options_of_the_deepseek_script_of_rocms_fork() -> None:
    renamed = {"--qk-head-dim": "--qk-nope-head-dim", "--qk-pos-emb-head-dim": "--qk-rope-head-dim"}
    words = [renamed.get(word, word) for word in DEEPSEEK_V2_LITE]
    place = words.index("--moe-shared-expert-intermediate-size")
    words[place : place + 2] = ["--enable-shared-expert", "--num-shared-experts", "2"]
    result = translated([*words, "--train-mode", "pretrain", "--dataset", "LLama-Pretrain-Idxmap"])
    expected = translated(DEEPSEEK_V2_LITE)
    assert result.model == expected.model and result.translation.settings == expected.translation.settings
    assert {"--enable-shared-expert", "--dataset LLama-Pretrain-Idxmap"} <= statuses(result.translation).keys()
    with pytest.raises(UsageError, match="--train-mode finetune  Isthmus does not support it"):
        translated([*words, "--train-mode", "finetune"])


def test_latent_attention() -> None:
    result = translated(DEEPSEEK_V2_LITE)
    assert result.translation.settings == _ADAM | _SEEDS | _DROPOUT | {
        "out": "runs/megatron",
        "tokenizer.path": "deepseek-ai/DeepSeek-V2-Lite",
        "tokenizer.type": "DeepSeekV2Tokenizer",
        "data.seq_length": 4096,
        "data.mock": True,
        "data.valid_fraction": 0.03,
        "data.test_fraction": 0.001,
        "parallel.ep": 8,
        "moe.dispatcher": "alltoall",
        "moe.seq_aux_loss": 0.001,
        "train.micro_batch_size": 4,
        "train.global_batch_size": 256,
        "train.steps": 50,
        "train.precision": "bf16",
        "train.recompute": "selective",
        "train.recompute_modules": ["core_attn"],
        "optim.lr": 1e-5,
        "optim.min_lr": 1e-6,
        "optim.weight_decay": 0.1,
        "optim.beta2": 0.95,
        "optim.schedule": "linear",
        "optim.warmup_steps": 2,
        "checkpoint.save_final": False,
        "checkpoint.resume": "never",
        "logging.every": 100,
    }
    assert result.model["moe_layer_freq"] == [0] + [1] * 26
    assert rows_by_name(result.translation) == 102400
    assert statuses(result.translation) == {
        "--moe-enable-deepep": "different",
        "--moe-router-force-load-balancing": "unsupported",
        "--moe-token-dispatcher-type flex": "different",
        "--exit-interval 20": "mistake",
    }


def test_spellings_of_old_releases() -> None:
    result = translated(GPT_345M)
    assert result.translation.settings == _ADAM | _SEEDS | _DROPOUT | _DOCUMENTS | {
        "out": "ck",
        "tokenizer.path": "gpt2",
        "tokenizer.type": "GPT2BPETokenizer",
        "data.seq_length": 1024,
        "data.files": ["my-gpt2_text_document"],
        "data.valid_fraction": 0.05,
        "data.test_fraction": 0.001,
        "parallel.tp": 1,
        "train.micro_batch_size": 8,
        "train.global_batch_size": 64,
        "train.steps": 500000,
        "train.eval_every": 1000,
        "train.precision": "fp16",
        "train.initial_loss_scale": 4294967296.0,
        "train.loss_scale_window": 1000,
        "train.recompute": "full",
        "optim.lr": 0.00015,
        "optim.min_lr": 1e-5,
        "optim.weight_decay": 0.01,
        "optim.beta2": 0.999,
        "optim.schedule": "cosine",
        "optim.warmup_steps": 3200,
        "optim.schedule_steps": 320000,
        "checkpoint.every": 10000,
        "checkpoint.resume": "auto",
        "logging.every": 100,
    }
    assert rows_by_name(result.translation) == 50257


@pytest.mark.parametrize(
    ("more", "settings"),
    [
        (
            "--recompute-granularity selective --recompute-modules mlp layernorm mla_up_proj",
            {"train.recompute_modules": ["mlp", "layernorm"]},
        ),
        ("--activations-checkpoint-method uniform", {"train.recompute": "full"}),
        ("--fp8-format e4m3 --bf16", {"train.precision": "fp8", "train.fp8_format": "e4m3"}),
        ("--fp8-format e4m3 --fp8-recipe tensorwise --bf16", {"train.fp8_scaling": None}),
        ("--fp8-format e4m3 --fp8-recipe blockwise --bf16", {"train.fp8_scaling": "blockwise"}),
        ("--fp8-format e4m3 --fp8-recipe mxfp8 --bf16", {"train.fp8_scaling": "mxfp8"}),
        ("--use-torch-fsdp2 --overlap-grad-reduce", {"parallel.fsdp": True, "parallel.overlap_grad_reduce": None}),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4", {"parallel.vpp": 4}),
        ("--lr-warmup-iters 20", {"optim.warmup_steps": 9}),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-warmup-iters 2",
            {"optim.schedule": "wsd", "optim.decay_steps": 4, "optim.warmup_steps": 2},
        ),
        ("--eval-iters 0 --eval-interval 5", {"data.valid_fraction": 0.0, "train.eval_every": None}),
        ("--load elsewhere --save here", {"out": "here", "checkpoint.resume": "elsewhere"}),
        ("--sft", {"recipe": "sft"}),
        ("--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2",
         {"moe.aux_loss": 0.1, "moe.seq_aux_loss": 0.2, "moe.dispatcher": "allgather"}),
        ("--moe-num-experts=4 --moe-top-k 2 --moe-loss-weight=0.4 --moe-capacity-factor 1 --moe-zloss-weight 0.5",
         {"moe.aux_loss": 0.05, "moe.capacity_factor": 1.0, "moe.z_loss": 0.5}),
        ("--optimizer-cpu-offload", {"optim.offload": True}),
        ("--hidden-dropout 0.2", {"train.hidden_dropout": 0.2, "train.attention_dropout": 0.0}),
        ("--no-mock-data --data-path a --reset-position-ids --eod-mask-loss", _DOCUMENTS
         | {"data.reset_position_ids": True, "data.eod_mask_loss": True}),
        ("--distributed-timeout-minutes 60", {"parallel.timeout_s": 3600.0}),
    ],
)  # fmt: skip
def test_single_arguments(more: str, settings: dict[str, Any]) -> None:
    translation = translated([*ENOUGH, *more.split()]).translation
    assert {name: translation.settings.get(name) for name in settings} | {"recipe": translation.recipe} == {
        "recipe": "pretrain"
    } | settings


def test_flags_that_megatron_never_had() -> None:
    words = "--gradient-accumulation-steps 8 --fused-bias-gelu --fused-bias-mha --overlap-comm --log-level debug"
    assert statuses(translated([*ENOUGH, *words.split()]).translation) == dict.fromkeys(
        ["--gradient-accumulation-steps 8", *words.split()[2:5], "--log-level debug"], "mistake"
    )


def test_all_errors_are_raised_at_once() -> None:
    words = "--num-layer 3 --lr much --rampup-batch-size 1 2 3 --optimizer muon --fp16 x --lr-decay-style odd"
    with pytest.raises(UsageError) as refused:
        translated([*ENOUGH, *words.split()])
    lines = str(refused.value).splitlines()
    assert len(lines) == 7
    for part in ("did you mean --num-layers", "must be a number, got 'much'", "--rampup-batch-size 1 2 3", "AdamW"):
        assert sum(part in line for line in lines) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--num-attention-heads 0", "must be a whole number of 1 or more, got '0'"),
        ("--num-layers-per-virtual-pipeline-stage 0", "must be a whole number of 1 or more, got '0'"),
        ("--num-experts 2 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1 2 3",
         "must be one number for each type of loss"),
    ],
)  # fmt: skip
def test_invalid_values_are_refused(more: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        translated([*ENOUGH, *more.split()])


def test_each_argument_is_in_one_table() -> None:
    tables = [TABLES[name] for name in ("translated", "extra", "different", "unsupported", "refused")]
    names = [entry.split("=")[0] for table in tables for entries in table.values() for entry in entries.split()]
    assert {name: count for name, count in Counter([*names, *NEVER]).items() if count > 1} == {}
    flags = [TABLES[name].values() for name in ("renamed", "other_names", "turned_off")]
    listed = {*chain(*flags), *ARGUMENTS, *SETTINGS.values()}
    assert listed <= set(names)


def test_an_explicit_default_has_no_remark() -> None:
    words = "--transformer-impl transformer_engine --distributed-backend nccl --manual-gc-interval 0 --fp8-margin 0.0"
    assert not translated([*ENOUGH, *words.split()]).translation.remarks


def test_the_default_batch_size_depends_on_the_ranks() -> None:
    place = ENOUGH.index("--global-batch-size")
    words = [*ENOUGH[:place], *ENOUGH[place + 2 :], "--tensor-model-parallel-size", "2"]
    translation = translate_arguments(read_flags(words), World(nnodes=2, nproc_per_node=4), "x").translation
    assert translation.settings["train.global_batch_size"] == 4
    with pytest.raises(UsageError, match="--global-batch-size"):
        translated(words)


def test_other_kinds_of_models_are_refused() -> None:
    with pytest.raises(UsageError, match="another kind of model"):
        translated("torchrun pretrain_bert.py --num-layers 2".split())
