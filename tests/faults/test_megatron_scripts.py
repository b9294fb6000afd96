"""Commands of Megatron-LM guides and experiments of Primus train on CPU ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.command import rows
from faults.fork_server import ForkServer
from faults.hosts import rank_variables
from unit.config.dialects.examples import MODEL_FILES
from unit.hf.tokenizer.gpt2_files import write_gpt2_files

TEXTS = [f"The number {number} comes before the number {number + 1}, and after {number - 1}." for number in range(96)]
EXPORTS = """\
# Set environment variables
export HIP_VISIBLE_DEVICES=0,1
export MASTER_ADDR=localhost
export MASTER_PORT=6000

"""
COMMAND = """\
    --num-layers 2 \\
    --hidden-size 32 \\
    --num-attention-heads 4 \\
    --seq-length 32 \\
    --micro-batch-size 2 \\
    --global-batch-size 8 \\
    --train-iters {steps} \\
    --lr 0.001 \\
    --min-lr 0.00001 \\
    --lr-decay-style cosine \\
    --lr-warmup-fraction 0.01 \\
    --weight-decay 0.01 \\
    --clip-grad 1.0 \\
    --fp16 {more} \\
    --data-path data/dataset \\
    --vocab-file gpt2/vocab.json \\
    --merge-file gpt2/merges.txt \\
    --save {name}/checkpoints \\
    --load {name}/checkpoints \\
    --tensorboard-dir {name}/tensorboard
"""
SCALED = "--loss-scale 0 --initial-loss-scale 4096 --min-loss-scale 1 --loss-scale-window 1000"
LINES = {
    "unscaled": ("python pretrain_gpt.py", "", 40),
    "no-dropout": ("python pretrain_gpt.py --attention-dropout 0 --hidden-dropout 0", SCALED, 4),
    "single": ("python pretrain_gpt.py", SCALED, 4),
    "data": ("torchrun --nproc_per_node=2 pretrain_gpt.py", SCALED, 4),
    "tensor": ("torchrun --nproc_per_node=2 pretrain_gpt.py --tensor-model-parallel-size 2", SCALED, 4),
    "pipeline": ("torchrun --nproc_per_node=2 pretrain_gpt.py --pipeline-model-parallel-size 2", SCALED, 4),
}
PRIMUS = """
   # model to run
   model: llama3.1_8B.yaml  # Model architecture yaml
   overrides:
     # log
     disable_wandb: false
     disable_tensorboard: false
     stderr_sink_level: DEBUG

     log_avg_skip_iterations: 2
     log_avg_reset_interval: 50

     train_iters: 50
     micro_batch_size: 2
     global_batch_size: 128

     seq_length: 8192
     max_position_embeddings: 8192

     lr: 1.0e-5
     min_lr: 0.0
     lr_warmup_iters: 2
     lr_decay_iters: null
     lr_decay_style: cosine
     weight_decay: 0.1
     adam_beta1: 0.9
     adam_beta2: 0.95
     eod_mask_loss: true
     init_method_std: 0.008
     norm_epsilon: 1.0e-6
"""
PRIMUS_MODEL = """
num_layers: 2
hidden_size: 32
ffn_hidden_size: 64
num_attention_heads: 4
num_query_groups: 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, isthmus: ForkServer) -> Path:
    """GPT-2 BPE files, and a dataset of indexed files that is made with them."""
    root = tmp_path_factory.mktemp("guide")
    write_gpt2_files(root / "gpt2", TEXTS)
    (root / "text.txt").write_text("\n".join(TEXTS))
    args = "prepare text.txt data/dataset --kind text --tokenizer gpt2 --tokenizer-type GPT2BPETokenizer".split()
    assert isthmus(*args, cwd=root).returncode == 0
    return root


def translated(isthmus: ForkServer, folder: Path, name: str) -> list[str]:
    """Write the config of a line of the guide; returns the command that its first comment gives."""
    launcher, more, steps = LINES[name]
    command = f"{launcher} \\\n{COMMAND.format(steps=steps, more=more, name=name)}"
    (folder / f"{name}.sh").write_text(EXPORTS + command)
    result = isthmus("config", "from-megatron", f"{name}.sh", cwd=folder)
    assert result.returncode == 0, result
    (folder / "run.yaml").write_text(result.stdout)
    (folder / f"{name}.yaml").write_text(result.stdout)
    start = result.stdout.splitlines()[2].removeprefix("#").split()
    assert start[:2] == ["isthmus", "pretrain"]
    return start[1:]


@pytest.mark.thorough
def test_each_line_of_the_guide_trains(isthmus: ForkServer, folder: Path) -> None:
    losses, scales = {}, {}
    for name in LINES:
        command = translated(isthmus, folder, name)
        assert command[2:] == (["--nproc", "2"] if LINES[name][0].startswith("torchrun") else [])
        ranks = rank_variables(2) if "--nproc" in command else [{}]
        done = isthmus.start_ranks([[(command[:2], variables) for variables in ranks]], cwd=folder).wait()
        assert [item.returncode for item in done] == [0] * len(ranks), done
        steps = [row for row in rows(folder / name / "checkpoints") if "loss" in row]
        losses[name] = [row["loss"] for row in steps]
        scales[name] = [row["loss_scale"] for row in steps]
    # Megatron-LM's initial scale, which skips the first steps.
    assert scales["unscaled"][0] == 2**32 and scales["single"][0] == 4096
    assert losses["unscaled"][-1] < losses["unscaled"][0] - 0.1
    assert losses["single"][-1] < losses["single"][0] != losses["no-dropout"][0]
    for name in ("data", "tensor", "pipeline"):
        assert losses[name] == pytest.approx(losses["single"], rel=1e-3), name


def test_an_experiment_without_data_trains_after_the_error_is_followed(
    isthmus: ForkServer, folder: Path, tmp_path: Path
) -> None:
    for name, text in MODEL_FILES.items():
        (tmp_path / name).write_text(text + (PRIMUS_MODEL if name == "llama3.1_8B.yaml" else ""))
    (tmp_path / "llama3.1_8B-pretrain.yaml").write_text(PRIMUS)
    words = ["config", "from-primus", "llama3.1_8B-pretrain.yaml"]
    assert "data.files  is missing" in (error := isthmus(*words, cwd=tmp_path).error(2)) and "--data or" in error
    words += ["--data", f"{folder}/text.txt", f"tokenizer.path={folder}/gpt2", "tokenizer.type=GPT2BPETokenizer"]
    words += ["data.seq_length=32", "train.global_batch_size=4", "train.steps=4"]
    result = isthmus(*words, cwd=tmp_path)
    assert result.returncode == 0 and "disable_wandb: false (unsupported)" in result.stdout, result
    (tmp_path / "run.yaml").write_text(result.stdout)
    done = isthmus("pretrain", "run.yaml", cwd=tmp_path)
    assert done.returncode == 0, done
    steps = [row for row in rows(tmp_path / "runs" / "llama3.1_8B-pretrain") if "loss" in row]
    assert [row["lr"] for row in steps][:3] == [0.0, 5e-6, 1e-5] and len(steps) == 4
