"""Command lines of ROCm's documentation on a machine without a GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from isthmus.cli import process
from isthmus.cli.main import main
from isthmus.config.dialects.rocm_scripts import llama_script
from isthmus.hf.tiny_model import build_tiny_qwen3

ROOT = Path(__file__).resolve().parents[4]
SCRIPTS = sorted((ROOT / "examples").rglob("*.sh"))
TEXT = "To be, or not to be: that is the question.\n" * 200


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "ISTHMUS_RANK_REPORTS", "MODEL_SIZE", "MBS", "BS", "TP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process, "run_folder", None)
    monkeypatch.setattr(process, "argv", [])
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    build_tiny_qwen3(
        tmp_path / "model", [TEXT], vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    return tmp_path / "model"


LOCAL = "model.path=model data.mock=false data.files=[text.txt] tokenizer.type=null tokenizer.vocab_size=null"


def bash(line: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment)


@pytest.mark.processes
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_shell(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
    if script.name in ("train_llama2.sh", "train_llama3.sh"):
        # ROCm's validation suite rewrites the one line with this prefix.
        assert len(re.findall(r"^TRAIN_LOG=", script.read_text(), re.MULTILINE)) == 1


@pytest.mark.slow
def test_a_config_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MBS", "4")
    words = ["config", "from-env", "llama3", "MODEL_SIZE=8B", "BS=64", "TP=1", "GEMM_TUNING=1"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert (
        "# - GEMM_TUNING=1 (different): " in text
        and "gemm_tuning: true" in text
        and "micro_batch_size: 4  # MBS=4" in text
    )
    values = YAML(typ="safe").load(text)
    assert values["train"]["global_batch_size"] == 64
    assert main([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    printed["config"]["out"] = values["out"]  # contains the time
    assert printed["config"] == values and printed["origins"]["model.path"] == "MODEL_SIZE=8B"
    for wrong, message in {"MODEL=8": "did you mean MODEL_SIZE?", "optim.lrr=1": "optim.lrr"}.items():
        assert main([*words, wrong]) == 2 and message in capsys.readouterr().err
    ranks = ["NNODES=2", "NODE_RANK=1", "MASTER_ADDR=n0", "NPROC=4", "NCCL_IB_HCA=mlx5", "HF_TOKEN=secret"]
    assert main([*words, *ranks]) == 0  # ranks are in the command, not in the config
    text = capsys.readouterr().out
    at = "NCCL_IB_HCA=mlx5 HF_TOKEN=... torchrun --nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr n0"
    assert at in text and "secret" not in text
    assert main(["config", "from-env", "llama4"]) == 2
    assert main(["config", "from-env", "llama2", "MBS=3", "BS=56", "TP=1"]) == 2
    assert "Use BS=48 or BS=72, or MBS=1 or MBS=7" in capsys.readouterr().err


@pytest.mark.processes
def test_a_documented_command_trains_on_a_cpu_and_writes_its_log(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # As in the validation suite: its log path, and later only the summary of the log.
    script = Path("train_llama3.sh")
    text = (ROOT / "examples/llama/train_llama3.sh").read_text()
    script.write_text(re.sub(r"^TRAIN_LOG=.*$", "TRAIN_LOG=logs/node0/training.log", text, flags=re.MULTILINE))
    # Two lines as in the documentation, the first with export.
    line = "export TEE_OUTPUT=0 MBS=2 BS=4 TP=1 TE_FP8=0 NO_TORCH_COMPILE=1 MODEL_SIZE=8 TOTAL_ITERS=5\n"
    done = bash(f"{line}SEQ_LENGTH=64 bash {script} {LOCAL} train.precision=fp32 LOG_DIR=here GEMM_TUNING=1")
    assert done.returncode == 0, done.stderr
    log = Path("logs/node0/training.log").read_text()
    assert "lm loss" not in done.stderr + done.stdout and "tokens/GPU/s: " in done.stdout
    assert "GEMM_TUNING=1 (different)" in log and "train.gemm_tuning=true has no effect: " in log
    assert "NO_TORCH_COMPILE=1 (unsupported)" in log and "memory, estimated: " in log and "1 x 1 ranks (cpu: " in log
    tail = "\n".join(log.splitlines()[-15:])
    for pattern in (
        r"throughput per GPU(?:\s*\([^)]*\))?\s*:\s+([0-9\.]+)", r"tokens\/GPU\/s:\s+([0-9]+)",
        r"mem usages:\s+([0-9\.]+)", r"elapsed time per iteration \(ms\):\s+([0-9\.]+)",
    ):  # fmt: skip
        assert re.search(pattern, tail), pattern
    rows = [json.loads(row) for row in Path("here/run/metrics.jsonl").read_text().splitlines()]
    # The first steps of a cosine over 320000 steps.
    assert [row["lr"] for row in rows] == pytest.approx([1e-4] * 5, rel=1e-6)
    assert not Path("here/run/hf").exists() and not Path("here/run/checkpoints").exists()
    words = ["MBS=2", "BS=4", "TP=1", "SEQ_LENGTH=64", "NPROC=1", "NO_TRAINING=1", "TRAIN_LOG=logs/node0/training.log"]
    assert main(["config", "from-env", "llama3", "--run", *words]) == 0
    assert capsys.readouterr().out.startswith("means over 2 of 5 iterations:\nthroughput per GPU: ")
    assert main(["config", "from-env", "llama3", "--run", *words[:-1], "TRAIN_LOG=text.txt"]) == 65
    assert main(["config", "from-env", "llama3", "--run", *words[:-2], "TRAIN_LOG=here", *LOCAL.split()]) == 74
    assert "here: Is a directory" in capsys.readouterr().err


@pytest.mark.slow
def test_fine_tuning_variables_are_translated(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def config(script: str, *words: str) -> tuple[int, str, str]:
        code = main(["config", "from-env", script, *words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    code, text, _ = config(
        "llama3.2-1b", "NUM_QUERY_GROUPS=8", "CONVERT_SEQUENCE_PARALLEL=1", "BASE_CKPT_DIR=base_tp8_pp1", "LR=1e-5"
    )
    settings = YAML(typ="safe").load(text)
    assert code == 0 and settings["recipe"] == "sft" and settings["train"]["global_batch_size"] == 128
    assert settings["optim"]["lr"] == 1e-5 and settings["optim"]["min_lr"] == pytest.approx(1e-6)
    assert settings["model"]["path"] == "meta-llama/Llama-3.2-1B-Instruct" and settings["parallel"] == {
        "tp": 8,
        "pp": 1,
    }
    for option in ("NUM_QUERY_GROUPS=8", "CONVERT_SEQUENCE_PARALLEL=1", "BASE_CKPT_DIR=base_tp8_pp1"):
        assert f"# - {option} (different): " in text
    code, text, _ = config("qwen3-0.6b", "KV_CHANNELS=128", "NUM_QUERY_GROUPS=8", "TRAIN_ITERS=6", "TP=1")
    assert code == 0 and YAML(typ="safe").load(text)["train"]["steps"] == 6
    wrong = {
        "NUM_QUERY_GROUPS=4": "config.json has num_key_value_heads=8",
        "HF_MODEL_DIR=model KV_CHANNELS=128": "config.json has head_dim=16",
        "LR=fast": "LR=fast: must be a number above 0",
        "BS=4": "no variable BS; did you mean MBS?",
    }
    for words, message in wrong.items():
        code, _, error = config("qwen3-0.6b", "TP=1", *words.split())
        assert code == 2 and message in error
    (Path("old") / "mp_rank_00").mkdir(parents=True)
    code, _, error = config("qwen3-0.6b", "INIT_CHECKPOINT=old")
    assert code == 2 and "isthmus convert old old-hf --to hf, then set HF_MODEL_DIR=old-hf" in error


@pytest.mark.thorough
@pytest.mark.processes
def test_fine_tuning_scripts_start_from_a_megatron_checkpoint(model: Path) -> None:
    """Both scripts of a model: the chats are tokenized, the checkpoint is converted, and two ranks train."""
    from isthmus.convert.legacy.legacy_layout import LegacyLayout
    from isthmus.convert.transfer import convert

    convert(model, Path("base_tp1_pp1"), "torch", layout=LegacyLayout())
    turns = [{"role": "user", "content": "To be?"}, {"role": "assistant", "content": "That is the question."}]
    Path("chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 16)
    folder = ROOT / "examples/qwen3-0.6b"
    done = bash(f"DATASET=chats.jsonl HF_MODEL_DIR=model DATA_DIR=tokens bash {folder}/02-generate.sh")
    assert done.returncode == 0 and Path("tokens/sft.idx").is_file(), done.stderr
    variables = "BASE_CKPT_DIR=base_tp1_pp1 HF_MODEL_DIR=model DATA_DIR=tokens TRAIN_ITERS=2 GBS=2 SEQ_LENGTH=32 TP=2"
    shapes = "NUM_QUERY_GROUPS=1 KV_CHANNELS=16 CONVERT_SEQUENCE_PARALLEL=1 LOG_DIR=log"
    done = bash(f"{variables} {shapes} NPROC=2 bash {folder}/03-train-dense.sh platform=cpu train.precision=fp32")
    assert done.returncode == 0, done.stderr + done.stdout
    assert (Path("base_tp1_pp1-hf") / "tokenizer.json").is_file()
    rows = [json.loads(row) for row in Path("log/run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    assert (Path("log/run/hf") / "model.safetensors").is_file()
    assert "NUM_QUERY_GROUPS=1" in Path("log/train.log").read_text()


@pytest.mark.thorough
@pytest.mark.processes
def test_a_layout_that_does_not_fit_the_machine_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = Path("large")
    shutil.copytree(model, large)
    (large / "model.safetensors").unlink(missing_ok=True)
    config = json.loads((large / "config.json").read_text())
    del config["layer_types"]
    config |= {
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
        "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip
    (large / "config.json").write_text(json.dumps(config))
    line = f"MBS=1 BS=8 TP=1 SEQ_LENGTH=64 MODEL_SIZE=70 bash {ROOT}/examples/llama/train_llama3.sh {LOCAL}"
    line = line.replace("model.path=model", "model.path=large")
    words = [word for word in line.split() if word not in ("bash", f"{ROOT}/examples/llama/train_llama3.sh")]
    assert main(["config", "from-env", "llama3", "--run", "DRY_RUN=1", *words]) == 2
    shown = capsys.readouterr().out
    assert "# this run would fail here: the model (qwen3) has" in shown and "# command: isthmus pretrain" in shown
    assert YAML(typ="safe").load(shown)["model"]["path"] == "large" and not Path("experiment").exists()
    refused = bash(line)
    assert refused.returncode == 2 and "GiB: weights" in refused.stdout and "fsdp" in refused.stdout


@pytest.mark.processes
def test_scripts_prepare_data_with_the_expected_names(model: Path, tmp_path: Path) -> None:
    (tmp_path / "python").write_text('#!/usr/bin/env bash\necho "$@" > words\n')  # record the command
    (tmp_path / "python").chmod(0o755)
    script = f"PYTHON=./python bash {ROOT}/examples/llama/prepare_dataset.sh"
    assert bash(f"DATASET=wiki TOKENIZER_MODEL=tok {script}").returncode == 0
    command = (
        "-m isthmus prepare hf:wikimedia/wikipedia/20231101.en data/wiki_text_document --tokenizer tok --kind text"
    )
    assert Path("words").read_text().strip() == command
    done = bash(f"{script} DATASET=/d/books.jsonl.gz TOKENIZER_MODEL=tok DATA_DIR=here")
    assert "prepare /d/books.jsonl.gz here/books_text_document " in Path("words").read_text()
    assert "DATA_PATH=here/books_text_document" in done.stdout
    assert bash(f"DATASET=bookcorpus {script}").returncode == 0
    command = "prepare hf:rojagtap/bookcorpus data/bookcorpus_text_sentence --tokenizer meta-llama/Llama-3.1-8B "
    assert command in Path("words").read_text()
    shutil.copytree(model, "books/tokenizer_llama3")  # the folder that ROCm's scripts download it into
    Path("books/bookcorpus.jsonl").write_text(json.dumps({"text": TEXT}))  # of the user
    assert bash(f"DATASET=bookcorpus DATA_DIR=books {script}").returncode == 0
    assert main(Path("words").read_text().split()[2:]) == 0
    (prepared,) = Path("books").glob("*.bin")
    assert prepared.name == "bookcorpus_text_sentence.bin" and prepared.stat().st_size > 0
    assert llama_script._TOKENIZERS["llama3"] == "meta-llama/Llama-3.1-8B"
    folder = f"PYTHON=./python bash {ROOT}/examples/llama3.2-1b"
    assert bash(f"{folder}/02-generate.sh DATASET=c.jsonl SEQ_LENGTH=64 DATA_DIR=d").returncode == 0
    command = "prepare c.jsonl d/sft --kind chat --tokenizer meta-llama/Llama-3.2-1B-Instruct --seq-length 64"
    assert Path("words").read_text().strip() == f"-m isthmus {command}"
    assert "DATASET is missing" in bash(f"{folder}/02-generate.sh").stderr
    assert bash(f"{folder}/03-train-dense.sh TP=2 train.seed=1").returncode == 0
    assert Path("words").read_text().strip() == "-m isthmus config from-env llama3.2-1b --run -- TP=2 train.seed=1"
    refused = bash(f"{script} DATASETS=wiki")
    assert refused.returncode == 2 and "DATASETS=wiki is none of DATASET" in refused.stderr
