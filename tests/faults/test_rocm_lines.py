"""The command lines in ROCm's documentation, rehearsed on CPU ranks: the same layout and precision, a small model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from faults.command import CompletedCommand
from faults.fork_server import ForkServer
from faults.hosts import rank_variables

ONE_RANK = [
    ("llama3", "TEE_OUTPUT=1 MBS=2 BS=128 TP=1 TE_FP8=1 SEQ_LENGTH=8192 MODEL_SIZE=8 TOTAL_ITERS=50"),
    ("llama3", "TEE_OUTPUT=1 MBS=2 BS=128 TP=1 TE_FP8=0 SEQ_LENGTH=8192 MODEL_SIZE=8 TOTAL_ITERS=50"),
    ("llama2", "TEE_OUTPUT=1 MBS=4 BS=256 TP=1 TE_FP8=1 SEQ_LENGTH=4096 MODEL_SIZE=7 TOTAL_ITERS=50"),
    ("llama2", "TEE_OUTPUT=1 MBS=4 BS=256 TP=1 TE_FP8=0 SEQ_LENGTH=4096 MODEL_SIZE=7 TOTAL_ITERS=50"),
    (
        "llama3",
        "TEE_OUTPUT=1 MBS=3 BS=24 TP=1 TE_FP8=0 FSDP=1 RECOMPUTE=1 SEQ_LENGTH=8192 MODEL_SIZE=70 TOTAL_ITERS=50",
    ),
    (
        "llama2",
        "TEE_OUTPUT=1 MBS=7 BS=56 TP=1 TE_FP8=0 FSDP=1 RECOMPUTE=1 SEQ_LENGTH=4096 MODEL_SIZE=70 TOTAL_ITERS=50",
    ),
    ("deepseek_v2", "GEMM_TUNING=1 PR=fp8 MBS=4 AC=sel SEQ_LEN=4096 PAD_LEN=4096 TRAIN_ITERS=50 EP=1"),
]
"""One rank each. The 70B line of Llama 2 has MBS=7: 56 is no multiple of its MBS=3 on 8 GPUs, or on one."""
TWO_RANKS = [
    ("llama2", "TEE_OUTPUT=1 MBS=5 BS=120 TP=2 TE_FP8=0 NO_TORCH_COMPILE=1 SEQ_LENGTH=4096", "tp=2 +sp pp=1 dp=1"),
    ("llama2", "TEE_OUTPUT=1 MBS=4 BS=64 TP=2 TE_FP8=1 NO_TORCH_COMPILE=1 SEQ_LENGTH=4096", "tp=2 +sp pp=1 dp=1"),
    ("deepseek_v2", "GEMM_TUNING=1 PR=bf16 MBS=4 AC=none SEQ_LEN=4096 PAD_LEN=4096 TRAIN_ITERS=50 EP=2", "ep=2 dp=2"),
]
"""TP=8 and the script's EP=8 as 2."""


def from_env(isthmus: ForkServer, script: str, line: str, folder: Path, *options: str) -> CompletedCommand:
    return isthmus("config", "from-env", script, *options, "--", *line.split(), cwd=folder)


def iterations(log: str) -> list[float]:
    """The losses of a log in Megatron-LM's format."""
    return [float(loss) for loss in re.findall(r"iteration +\d+/ +\d+ \|.* lm loss: ([0-9.E+-]+) \|", log)]


def check(log: str, *, fp8: bool) -> None:
    assert "rehearsal, not the run: a small model" in log and "model.config.hidden_size: " in log
    losses = iterations(log)
    assert len(losses) == 5 and all(5.5 < loss < 7.0 for loss in losses)  # ln(512) = 6.2
    assert ("precision fp8: train.precision, emulated" in log) == fp8 and ("fp8: " in log) == fp8


@pytest.mark.thorough_cases(
    "llama3-TEE_OUTPUT=1 MBS=2 BS=128 TP=1 TE_FP8=1 SEQ_LENGTH=8192 MODEL_SIZE=8 TOTAL_ITERS=50",
    "llama3-TEE_OUTPUT=1 MBS=2 BS=128 TP=1 TE_FP8=0 SEQ_LENGTH=8192 MODEL_SIZE=8 TOTAL_ITERS=50",
    "deepseek_v2-GEMM_TUNING=1 PR=fp8 MBS=4 AC=sel SEQ_LEN=4096 PAD_LEN=4096 TRAIN_ITERS=50 EP=1",
    "llama2-TEE_OUTPUT=1 MBS=4 BS=256 TP=1 TE_FP8=0 SEQ_LENGTH=4096 MODEL_SIZE=7 TOTAL_ITERS=50",
    "llama2-line5",
    "llama3-line4",
)
@pytest.mark.parametrize(("script", "line"), ONE_RANK)
def test_lines_for_one_rank(isthmus: ForkServer, script: str, line: str, tmp_path: Path) -> None:
    done = from_env(isthmus, script, f"{line} REHEARSE=1", tmp_path, "--run")
    assert done.returncode == 0, done
    (log,) = (tmp_path / "experiment").rglob("*.log")
    text = log.read_text()
    check(text, fp8="TE_FP8=1" in line or "PR=fp8" in line)
    assert text.strip() in f"{done.stdout}{done.stderr}"  # TEE_OUTPUT=1
    assert ("dp=1 +fsdp" in text) == ("FSDP=1" in line)
    assert ("train.gemm_tuning=true has no effect: " in text) == ("GEMM_TUNING=1" in line)
    assert "throughput per GPU:" not in text


@pytest.mark.thorough_cases(
    "deepseek_v2-GEMM_TUNING=1 PR=bf16 MBS=4 AC=none SEQ_LEN=4096 PAD_LEN=4096 TRAIN_ITERS=50 EP=2-ep=2 dp=2",
    "llama2-TEE_OUTPUT=1 MBS=4 BS=64 TP=2 TE_FP8=1 NO_TORCH_COMPILE=1 SEQ_LENGTH=4096-tp=2 +sp pp=1 dp=1",
)
@pytest.mark.parametrize(("script", "line", "layout"), TWO_RANKS)
def test_lines_for_several_ranks(isthmus: ForkServer, script: str, line: str, layout: str, tmp_path: Path) -> None:
    printed = from_env(isthmus, script, line, tmp_path)
    (tmp_path / "run.yaml").write_text(printed.stdout)
    args = ["pretrain", "run.yaml", "--rehearse"]
    ranks = [(args, variables) for variables in rank_variables(2)]
    completed = isthmus.start_ranks([ranks], cwd=tmp_path).wait()
    assert [item.returncode for item in completed] == [0, 0], completed
    log = completed[0].stdout + completed[0].stderr
    check(log, fp8="TE_FP8=1" in line)
    assert layout in log


@pytest.mark.thorough
def test_two_nodes_share_a_log_folder(isthmus: ForkServer, tmp_path: Path) -> None:
    """The two lines for NODE0 and NODE1, each through torchrun."""
    port = rank_variables(2)[0]["MASTER_PORT"]
    line = "TEE_OUTPUT=0 MBS=2 BS=256 TP=1 TE_FP8=1 SEQ_LENGTH=8192 MODEL_SIZE=8 MASTER_ADDR=127.0.0.1 NNODES=2"
    more = f"MASTER_PORT={port} REHEARSE=1 LOG_DIR=shared"
    nodes = []
    for node in (0, 1):
        words = f"{line} NODE_RANK={node} {more}".split()
        nodes.append([(["config", "from-env", "llama3", "--run", "--", *words], {})])
    completed = isthmus.start_ranks(nodes, cwd=tmp_path).wait()
    assert [item.returncode for item in completed] == [0, 0], completed
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == [
        "output_perf.log", "output_perf.yaml", "output_perf_rank1.log", "output_perf_rank1.yaml", "run-rehearsal",
    ]  # fmt: skip
    first, second = ((tmp_path / "shared" / name).read_text() for name in ("output_perf.log", "output_perf_rank1.log"))
    check(first, fp8=True)
    assert "this is node 0" in first and "this is node 1" not in first and "dp=2" in first
    assert "this is node 1" in second and "this is node 0" not in second


def test_the_line_that_megatron_lm_refuses(isthmus: ForkServer, tmp_path: Path) -> None:
    line = "TEE_OUTPUT=1 MBS=3 BS=56 TP=1 TE_FP8=0 FSDP=1 RECOMPUTE=1 SEQ_LENGTH=4096 MODEL_SIZE=70 TOTAL_ITERS=50"
    refused = from_env(isthmus, "llama2", f"{line} REHEARSE=1", tmp_path, "--run")
    assert "BS=56 is not a multiple of MBS=3" in refused.error(2) and not (tmp_path / "experiment").exists()


def test_other_recipes_can_be_rehearsed(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    """With data, tokenizer and chat template of the run, and its checkpoint and export."""
    shown = isthmus(*sft_args, "--rehearse", "--dry-run", "parallel.tp=2", "--nproc", "2")
    assert shown.returncode == 0 and '"steps": 4' in shown.stdout and not (tmp_path / "out-rehearsal").exists()
    done = isthmus(*sft_args, "--rehearse", "train.precision=fp16")
    assert done.result["steps"] == 4 and done.result["model"] == str(tmp_path / "out-rehearsal/hf")
    assert "model.init: hf -> random" in done.stderr and "train.precision" not in done.stderr.split("platform cpu")[0]
    assert (tmp_path / "out-rehearsal/hf/tokenizer.json").exists() and not (tmp_path / "out").exists()
    assert "Leave it out" in isthmus(*sft_args, "train.emulate_fp8=true").error(2).replace("leave", "Leave")
