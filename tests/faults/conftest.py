"""Session fixtures: a tiny model, chat data and a fork server that runs commands."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.fork_server import ForkServer

CHATS = [
    {"instruction": f"Say the number {number}.", "input": "", "output": f"The number is {number}."}
    for number in range(64)
]


def tiny_qwen3(folder: Path) -> Path:
    """A Qwen3 model with two layers and two query groups, a few hundred kB."""
    from isthmus.hf.tiny_model import build_tiny_qwen3

    return build_tiny_qwen3(
        folder,
        (chat["instruction"] + chat["output"] for chat in CHATS),
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.json"
    path.write_text(json.dumps(CHATS))
    return path


@pytest.fixture(scope="session")
def isthmus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    fork_server = ForkServer(tmp_path_factory.mktemp("fork_server"))
    yield fork_server
    fork_server.close()


@pytest.fixture
def sft_args(model: Path, chats: Path, tmp_path: Path) -> list[str]:
    """Arguments of a fine-tuning run of about one second, with ``--out`` at ``tmp_path / "out"``."""
    args = ["sft", "--model", str(model), "--data", str(chats), "--out", str(tmp_path / "out"), "--json"]
    return [*args, "data.seq_length=64", "train.global_batch_size=4", "train.steps=4", "optim.lr=1e-3"]


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system with 600 kB, or the size that the test gives."""
    disk, size = tmp_path / "disk", getattr(request, "param", "600k")
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if (mounted := subprocess.run(command, capture_output=True, text=True)).returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()!r}; run as root to test a full disk")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)
