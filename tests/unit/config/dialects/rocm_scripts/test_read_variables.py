"""The command lines in ROCm's documentation become exactly these settings."""

from __future__ import annotations

import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from isthmus.config.dialects.rocm_scripts.read_variables import (
    batch_names,
    read_script,
    remark_on_full_nodes,
    with_start_time,
)
from isthmus.config.dialects.rocm_scripts.script_run import ScriptRun
from isthmus.config.dialects.translation import World, as_json, as_yaml
from isthmus.config.load import load_config
from isthmus.config.yaml_text import read_mapping
from isthmus.errors import UsageError

LLAMA: dict[str, Any] = {
    "model.init": "random", "data.mock": True, "data.valid_fraction": 0.0, "parallel.tp": 1, "parallel.pp": 1,
    "parallel.cp": 1, "parallel.timeout_s": 7200.0, "train.precision": "bf16", "optim.lr": 1e-4, "optim.min_lr": 1e-5,
    "optim.schedule": "cosine", "optim.schedule_steps": 320000, "optim.weight_decay": 0.1, "optim.clip_grad": 1.0,
    "optim.warmup_steps": 0,
    "optim.beta1": 0.9, "optim.beta2": 0.95, "tokenizer.type": "NullTokenizer", "checkpoint.save_final": False,
    "checkpoint.export_final": False, "logging.every": 1, "logging.style": "megatron",
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    name: value for name, value in LLAMA.items() if name not in ("parallel.timeout_s", "logging.every")
} | {
    "model.path": "preset:deepseek-v2-lite", "model.config.initializer_range": 0.008, "parallel.ep": 8,
    "optim.lr": 1e-5, "optim.min_lr": 1e-6,
    "optim.warmup_steps": 2, "optim.schedule_steps": 48, "moe.aux_loss": 0.01, "tokenizer.vocab_size": 102399,
}  # fmt: skip


def batch(preset: str, mbs: int, bs: int, length: int, steps: int, vocab: int) -> dict[str, Any]:
    return {
        "model.path": f"preset:{preset}", "train.micro_batch_size": mbs, "train.global_batch_size": bs,
        "data.seq_length": length, "train.steps": steps, "tokenizer.vocab_size": vocab - 1,
    }  # fmt: skip


FSDP = {"parallel.fsdp": True, "train.recompute": "full"}
L3 = "train_llama3.sh"
LINES: list[tuple[str, str, dict[str, Any], list[str]]] = [
    (
        "llama3", "TEE_OUTPUT=1 MBS=2 BS=128 TP=1 TE_FP8=1 SEQ_LENGTH=8192 MODEL_SIZE=8 TOTAL_ITERS=50",
        batch("llama3.1-8b", 2, 128, 8192, 50, 128256) | {"train.precision": "fp8"}, [L3, "TE_FP8=1"],
    ),
    (
        "llama3", "TEE_OUTPUT=1 MBS=2 BS=128 TP=1 TE_FP8=0 SEQ_LENGTH=8192 MODEL_SIZE=8 TOTAL_ITERS=50",
        batch("llama3.1-8b", 2, 128, 8192, 50, 128256), [L3],
    ),
    (
        "llama2", "TEE_OUTPUT=1 MBS=4 BS=256 TP=1 TE_FP8=1 SEQ_LENGTH=4096 MODEL_SIZE=7 TOTAL_ITERS=50",
        batch("llama2-7b", 4, 256, 4096, 50, 32000) | {"train.precision": "fp8"}, ["TE_FP8=1"],
    ),
    (
        "llama2", "TEE_OUTPUT=1 MBS=4 BS=256 TP=1 TE_FP8=0 SEQ_LENGTH=4096 MODEL_SIZE=7B TOTAL_ITERS=50",
        batch("llama2-7b", 4, 256, 4096, 50, 32000), [],
    ),
    (
        "llama3", "TEE_OUTPUT=1 MBS=3 BS=24 TP=1 TE_FP8=0 FSDP=1 RECOMPUTE=1 SEQ_LENGTH=8192 MODEL_SIZE=70 "
        "TOTAL_ITERS=50",
        batch("llama3.1-70b", 3, 24, 8192, 50, 128256) | FSDP, [L3],
    ),
    (
        "llama2", "TEE_OUTPUT=1 MBS=3 BS=56 TP=1 TE_FP8=0 FSDP=1 RECOMPUTE=1 SEQ_LENGTH=4096 MODEL_SIZE=70 "
        "TOTAL_ITERS=50",
        batch("llama2-70b", 3, 56, 4096, 50, 32000) | FSDP, ["BS"],
    ),
    (
        "llama2", "TEE_OUTPUT=1 MBS=5 BS=120 TP=8 TE_FP8=0 NO_TORCH_COMPILE=1 SEQ_LENGTH=4096",
        batch("llama2-70b", 5, 120, 4096, 10, 32000) | {"parallel.tp": 8}, ["MODEL_SIZE", "NO_TORCH_COMPILE=1"],
    ),
    (
        "llama2", "TEE_OUTPUT=1 MBS=4 BS=64 TP=8 TE_FP8=0 NO_TORCH_COMPILE=1 SEQ_LENGTH=4096",
        batch("llama2-70b", 4, 64, 4096, 10, 32000) | {"parallel.tp": 8}, ["MODEL_SIZE", "NO_TORCH_COMPILE=1"],
    ),
    (
        "deepseek_v2", "GEMM_TUNING=1 PR=bf16 MBS=4 AC=none SEQ_LEN=4096 PAD_LEN=4096 TRAIN_ITERS=50",
        {"train.micro_batch_size": 4, "train.global_batch_size": 256, "data.seq_length": 4096, "train.steps": 50,
         "train.recompute": "none", "train.gemm_tuning": True},
        ["train_deepseekv2.sh", "GEMM_TUNING=1", "PAD_LEN=4096"],
    ),
]  # fmt: skip


def read(script: str, line: str, *arguments: str) -> ScriptRun:
    run = read_script(script, {"PATH": "/bin", **dict(word.split("=", 1) for word in shlex.split(line))}, arguments)
    remark_on_full_nodes(script, run)
    return run


def remark_options(run: ScriptRun) -> list[str]:
    return [remark.option for remark in run.translation.remarks]


@pytest.mark.parametrize(("script", "line", "expected", "remarks"), LINES)
def test_documented_lines(script: str, line: str, expected: dict[str, Any], remarks: list[str]) -> None:
    run = with_start_time(read(script, line), datetime(2026, 11, 21, 19, 0, 5))
    settings = dict(run.translation.settings)
    out = settings.pop("out")
    assert settings == (DEEPSEEK if script == "deepseek_v2" else LLAMA) | expected
    assert out.startswith("experiment/") and "<" not in out + run.train_log and run.tee
    assert sorted(remark_options(run)) == sorted(remarks)
    assert set(run.translation.origins) == set(run.translation.settings)
    # The printed text is a config with the same values.
    text = as_yaml(run.translation, "A title.")
    values, _ = read_mapping(text)
    flat = as_json(run.translation)["config"]
    assert values == flat and all(f"- {name} (" in text for name in remarks)
    if "BS" not in remarks:
        config = load_config(None, None, [], {"recipe": "pretrain", **run.translation.settings})
        assert config.train.steps == run.translation.settings["train.steps"]
    # The same variables as arguments win over the environment.
    again = read_script(script, {"MBS": "77", "TEE_OUTPUT": "0"}, shlex.split(line))
    assert {**again.translation.settings, "out": out} == {**settings, "out": out}


def test_both_nodes() -> None:
    line = (
        "TEE_OUTPUT=1 MBS=2 BS=256 TP=1 TE_FP8=1 SEQ_LENGTH=8192 MODEL_SIZE=8 MASTER_ADDR=IP_NODE0 NNODES=2 NODE_RANK="
    )
    for rank in (0, 1):
        run = read("llama3", f"{line}{rank}")
        assert run.translation.world == World(2, rank, None, "IP_NODE0", 6000)
        assert "MASTER_ADDR=IP_NODE0" in remark_options(run)  # a placeholder
        assert run.train_log == (
            f"experiment/2nodes_rank{rank}_train_8B_mbs2_bs256_tp1_pp1_cp1_iter10/TE_FP8_1/<time>/output_perf.log"
        )
        # Each node has a log; the run folder is shared.
        assert run.setting("out") == "experiment/2nodes_train_8B_mbs2_bs256_tp1_pp1_cp1_iter10/TE_FP8_1/run"
    shared = [read("llama3", f"{line}{rank} LOG_DIR=/nfs EXP_NAME=x").train_log for rank in (0, 1)]
    assert shared == ["/nfs/output_x.log", "/nfs/output_x_rank1.log"]
    assert read("llama3", f"{line}1 LOG_DIR=/nfs TRAIN_LOG=/nfs/mine.log").train_log == "/nfs/mine.log"
    deep = read("deepseek_v2", "NNODES=2 NODE_RANK=1 MASTER_ADDR=n0 TP=1")
    assert deep.train_log.endswith("_rank1.log") and "rank1" not in deep.setting("out")
    alone = read("llama2", "MODEL_SIZE=7 TP=1 MASTER_ADDR=node0")
    assert "NNODES is not given" in next(r.reason for r in alone.translation.remarks if r.option == "MASTER_ADDR=node0")
    for line, words in {"NNODES=2": "needs MASTER_ADDR", "NODE_RANK=1": "NNODES is not given"}.items():
        with pytest.raises(UsageError, match=words):
            read("llama2", line)


def test_a_batch_size_that_does_not_divide_names_sizes_that_do() -> None:
    run = read("llama2", "MBS=3 BS=56 TP=1 MODEL_SIZE=70")
    assert run.batch_size_error(8, batch_names("llama2")) == (
        "BS=56 is not a multiple of MBS=3 x 8 data-parallel ranks = 24 (8 ranks in all). Use BS=48 or BS=72, "
        "or MBS=1 or MBS=7"
    )
    assert run.batch_size_error(1, ("MBS", "BS")) is not None and run.batch_size_error(14, ("MBS", "BS")) is not None
    assert read("llama2", "MBS=7 BS=56 TP=1").batch_size_error(8, ("MBS", "BS")) is None
    assert read("llama2", "MBS=3 BS=56 TP=8").batch_size_error(4, ("MBS", "BS")) is None  # the layout's error is better
    for setting in ("train.micro_batch_size=0", "parallel.tp=x"):  # errors of the config
        assert read("llama2", "MBS=3 BS=56 TP=8", setting).batch_size_error(4, ("MBS", "BS")) is None


@pytest.mark.parametrize(
    ("script", "line", "arguments", "message"),
    [
        ("llama3", "MODEL_SIZE=7", (), "MODEL_SIZE=7: must be 8 or 70"),
        ("llama3", "TOTAL_ITERS=five", (), "TOTAL_ITERS=five: must be a whole number"),
        ("llama3", "TEE_OUTPUT=yes", (), "TEE_OUTPUT=yes: must be 0 or 1"),
        ("llama3", "", ("MBSS=2",), "no variable MBSS; did you mean MBS?"),
        ("llama3", "", ("MBS",), "MBS: expected NAME=VALUE"),
        ("llama3", "OPTIMIZER=sgd", (), "the optimizer is AdamW"),
        ("llama3", "TE_FP4=1", (), "not support FP4"),
        ("llama3", "TE_FP8=1 TE_FP8_RECIPE=rowwise", (), "must be delayed or tensorwise or mxfp8"),
        ("llama3", "TOKENIZER_TYPE=Llama2Tokenizer", (), "must be HuggingFaceTokenizer"),
        ("deepseek_v2", "AC=some", (), "must be none or sel or full"),
        ("llama3", "MBS=0 BS=x", (), "2 errors"),
    ],
)
def test_invalid_variables_are_refused(script: str, line: str, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        read(script, line, *arguments)


def test_arguments_override_the_environment_and_can_be_settings_or_library_variables() -> None:
    run = read("llama3", "MBS=4 MODEL_SIZE=8", "MBS=2", "BS=32.0", "model.config.num_hidden_layers=2",
               "NCCL_IB_HCA=a,b", "train.precision=fp32", "data.mock=false", "data.files=[a.txt]")  # fmt: skip
    settings = run.translation.settings
    assert (settings["train.micro_batch_size"], settings["train.global_batch_size"]) == (2, 32)
    small = read("llama3", "MODEL_SIZE=8", "model.config.vocab_size=512")
    assert small.translation.settings["tokenizer.vocab_size"] == 511
    assert settings["model.config.num_hidden_layers"] == 2 and settings["train.precision"] == "fp32"
    assert settings["data.files"] == ["a.txt"] and run.exports == {"NCCL_IB_HCA": "a,b"}
    values, _ = read_mapping(as_yaml(run.translation, ""))
    assert values["model"]["config"] == {"num_hidden_layers": 2} and values["data"]["mock"] is False


def test_mxfp8_is_translated() -> None:
    settings = read("llama3", "TE_FP8=1 TE_FP8_RECIPE=mxfp8").translation.settings
    assert (settings["train.precision"], settings["train.fp8_scaling"]) == ("fp8", "mxfp8")
    assert "train.fp8_scaling" not in read("llama3", "TE_FP8=1 TE_FP8_RECIPE=tensorwise").translation.settings


def test_data_checkpoints_and_logs() -> None:
    run = read("llama2", "MODEL_SIZE=13 MOCK_DATA=0 DATA_PATH=/d/books TOKENIZER_TYPE=Llama2Tokenizer "
                         "TOKENIZER_MODEL=/t/tok SAVE_CKPT_PATH=/c LOAD_CKPT_PATH=/old SAVE_INTERVAL=100 EVAL_ITERS=5 "
                         "ENABLE_PROFILING=1 LOG_DIR=/l EXP_NAME=mine TEE_OUTPUT=0 TP=8 "
                         "SEQ_PARALLEL=0 TOTAL_ITERS=40 WANDB_API_KEY=secret")  # fmt: skip
    settings = run.translation.settings
    expected = {
        "model.path": "preset:llama2-13b", "data.files": ["/d/books"], "tokenizer.type": "Llama2Tokenizer",
        "tokenizer.path": "/t/tok", "out": "/c", "checkpoint.resume": "/old", "checkpoint.every": 100,
        "train.eval_every": 5000, "train.profile": "10-12", "parallel.sp": False,
    }  # fmt: skip
    assert {name: settings[name] for name in expected} == expected
    assert "data.mock" not in settings and "checkpoint.save_final" not in settings
    assert (run.train_log, run.tee) == ("/l/output_mine.log", False)
    assert "secret" not in as_yaml(run.translation, "")
    mixed = read("llama3", "MODEL_SIZE=8 DATA_PATH='0.3 /d/a 0.7 /d/b'")
    assert mixed.translation.settings["data.sets.set2.weight"] == 0.7
    odd = read("llama3", "MODEL_SIZE=8 DATA_PATH='1.2.3 /d/a 1 /d/b'")
    assert odd.translation.settings["data.files"] == ["1.2.3", "/d/a", "1", "/d/b"]
    assert any("2026" in remark.reason for remark in mixed.translation.remarks)
    mock = read("llama3", "MODEL_SIZE=8 MOCK_DATA=1 DATA_PATH=/d/a TOKENIZER_MODEL=meta-llama/Llama-3.1-70B TE_BF16=1")
    assert {"DATA_PATH=/d/a", "TOKENIZER_MODEL=meta-llama/Llama-3.1-70B", "TE_BF16=1"} <= set(remark_options(mock))
    deep = read("deepseek_v2", "MOCK_DATA=0 DATA_DIR=/d TRAIN_ITERS=60 AC=sel EP=4 PR=fp8")
    assert deep.translation.settings["data.files"] == ["/d/mmap_deepseekv2_datasets_text_document"]
    assert deep.translation.settings["train.recompute"] == "selective"
    assert {"TRAIN_ITERS=60", "EP=4", "PR=fp8"} <= set(remark_options(deep))


def test_a_downloaded_tokenizer_is_the_default(tmp_path: Path) -> None:
    line = f"MODEL_SIZE=8 MOCK_DATA=0 DATA_DIR={tmp_path}"
    assert read("llama3", line).setting("tokenizer.path") == "meta-llama/Llama-3.1-8B"
    (tmp_path / "tokenizer_llama3").mkdir()
    assert read("llama3", line).setting("tokenizer.path") == f"{tmp_path}/tokenizer_llama3"
    assert read("llama3", f"{line} TOKENIZER_MODEL=x").setting("tokenizer.path") == "x"


def test_variables_without_effect_are_reported() -> None:
    variables = ["EVAL_INTERVAL=3", "SAVE_INTERVAL=4", "TE_FP8_RECIPE=tensorwise", "FP4_BF16_START=2", "SEQ_PARALLEL=1"]
    mock = ["DATA_DIR=/d", "TOKENIZER_TYPE=HuggingFaceTokenizer"]
    run = read_script("llama3", {}, ["MODEL_SIZE=8", "TP=1", *variables, *mock])
    assert {*variables, *mock} == {
        remark.option for remark in run.translation.remarks if remark.status == "unsupported"
    }
    with pytest.raises(UsageError) as refused:
        read_script("llama3", {}, ["MODEL_SIZE=8", "FSDP=yes"])
    assert str(refused.value) == "train_llama3.sh: FSDP=yes: must be 0 or 1."


def test_variables_that_were_lost_on_another_line_are_suspected() -> None:
    (remark,) = [r for r in read("llama2", "SEQ_LENGTH=4096").translation.remarks if r.option == "TP, MBS, BS"]
    assert remark.status == "mistake" and "start it with export" in remark.reason
    for line in ("SEQ_LENGTH=4096 MBS=5", "", "DRY_RUN=1"):
        assert "TP, MBS, BS" not in remark_options(read("llama2", line))


def test_similar_environment_variables_are_reported() -> None:
    options = remark_options(read("llama3", "MODEL_SIZE=8 GBS=64 TOTAL_ITER=5 HOME=/h SEQ_LENGTH=4096"))
    assert "GBS" in options and "TOTAL_ITER" in options and "HOME" not in options
    assert "BS" in remark_options(read("deepseek_v2", "BS=64"))
