"""Complete distillation runs: metrics, messages, files, resume and refused inputs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from faults.command import rows
from faults.conftest import CHATS
from faults.fork_server import ForkServer
from isthmus.hf.tiny_model import build_tiny_qwen3

TEXT = [chat["instruction"] + chat["output"] for chat in CHATS]


@pytest.fixture(scope="module")
def teacher(isthmus: ForkServer, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wider model that was trained on the chats."""
    root = tmp_path_factory.mktemp("teacher")
    build_tiny_qwen3(
        root / "model", TEXT, vocab_size=300, hidden_size=48, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    args = ["--model", root / "model", "--data", chats, "--out", root / "run", "train.steps=24", "optim.lr=1e-2"]
    sizes = ["data.seq_length=64", "train.global_batch_size=8", "train.micro_batch_size=8"]
    assert isthmus("sft", *args, *sizes, "logging.to=[]").returncode == 0
    return root / "run/hf"


@pytest.fixture
def args(model: Path, chats: Path) -> list[str]:
    settings = [
        "data.seq_length=64",
        "train.global_batch_size=8",
        "train.micro_batch_size=8",
        "optim.lr=1e-2",
        "optim.schedule=constant",
        "logging.to=[]",
    ]
    return ["distill", "--model", str(model), "--data", str(chats), "--json", "train.precision=fp32", *settings]


def test_the_student_approaches_the_teacher(
    isthmus: ForkServer, args: list[str], teacher: Path, tmp_path: Path
) -> None:
    args = [*args, f"distill.teacher={teacher}", "distill.sft_weight=0.5", "distill.temperature=1.5"]
    full, parts = tmp_path / "whole", tmp_path / "parts"
    completed = isthmus(*args, "--out", full, "train.steps=16")
    assert completed.returncode == 0, completed.stderr
    assert f"teacher {teacher}: qwen3, 3 layers, fp32" in completed.stderr
    assert re.search(r"memory, estimated: .*teacher 0\.\d+", completed.stderr)
    assert re.search(r"loss +\d\.\d+  sft +\d", completed.stderr)
    steps = [row for row in rows(full) if "loss" in row]
    assert all(row["loss"] == pytest.approx(row["distill_loss"] + row["sft_loss"] / 2) for row in steps)
    before, after = (row for row in rows(full) if "valid_loss" in row)
    assert after["valid_distill_loss"] < 0.3 * before["valid_distill_loss"]
    assert json.loads((full / "hf/config.json").read_text())["hidden_size"] == 32

    assert isthmus(*args, "--out", parts, "train.steps=9").returncode == 0
    assert "resumed from" in isthmus(*args, "--out", parts, "train.steps=16").stderr
    assert (parts / "hf/model.safetensors").read_bytes() == (full / "hf/model.safetensors").read_bytes()
    refused = isthmus(*args, "--out", parts, "train.steps=17", f"distill.teacher={args[2]}")
    assert "distill.teacher num_layers 3 -> 2" in refused.stderr
    assert refused.error(2) and "--accept-changes distill.teacher" in refused.stderr


def test_refused_teachers_leave_no_run_folder(
    isthmus: ForkServer, args: list[str], teacher: Path, tmp_path: Path
) -> None:
    other, out = tmp_path / "other", tmp_path / "out"
    build_tiny_qwen3(
        other, [text.upper() for text in TEXT], vocab_size=300, hidden_size=32, intermediate_size=32,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    refusals = {
        (2, "tokenizers of the student and of"): [f"distill.teacher={other}"],
        (66, "does not exist"): [f"distill.teacher={tmp_path / 'absent'}"],
        (2, "teacher  is missing: Hugging Face model folder"): [],
        (2, "does not divide num_attention_heads=4"): [f"distill.teacher={teacher}", "parallel.tp=3"],
        (2, "teacher_init=random"): ["distill.teacher=preset:qwen3-0.6b"],
        (2, "teacher_dtype=float16 with parallel.fsdp"): [
            f"distill.teacher={teacher}",
            "distill.teacher_dtype=float16",
            "parallel.fsdp=true",
        ],
        (2, f"distill.teacher={teacher}: distill.teacher_config: a model of type qwen3 does not use nonsense"): [
            f"distill.teacher={teacher}",
            "distill.teacher_config.nonsense=1",
        ],
        (2, "beta"): [f"distill.teacher={teacher}", "distill.beta=2"],
    }
    for (code, message), settings in refusals.items():
        completed = isthmus(*args, "--out", out, "train.steps=2", *settings)
        assert (completed.returncode, message in completed.stderr) == (code, True), completed.stderr
        assert "Traceback" not in completed.stderr
    assert not out.exists()


def test_a_rehearsal_has_a_small_teacher(isthmus: ForkServer, args: list[str], teacher: Path, tmp_path: Path) -> None:
    completed = isthmus(*args, "--out", tmp_path / "out", "train.steps=2", f"distill.teacher={teacher}", "--rehearse")
    assert completed.returncode == 0, completed.stderr
    assert "distill.teacher_init: hf -> random" in completed.stderr
    assert "distill.teacher_config.num_hidden_layers: 3 -> 2" in completed.stderr
