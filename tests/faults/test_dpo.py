"""Whole runs on preferences: what they tell and leave, how they go on, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from faults.command import rows
from faults.fork_server import ForkServer

REWARDS = {
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Numbers are to be said in whole sentences."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.json"
    numbers = [
        {
            "conversations": [{"from": "human", "value": f"Say the number {number}."}],
            "chosen": {"from": "gpt", "value": f"The number is {number}."},
            "rejected": {"from": "gpt", "value": f"{number}, as I say the number."},
        }
        for number in range(48)
    ]
    path.write_text(json.dumps(numbers))
    return path


@pytest.fixture
def words(model: Path, pairs: Path) -> list[str]:
    settings = ["train.global_batch_size=4", "train.micro_batch_size=2", "optim.lr=1e-3", "optim.schedule=constant"]
    return ["dpo", "--model", str(model), "--data", str(pairs), "--json", "train.precision=fp32", *settings]


def test_what_it_tells_and_how_it_goes_on(isthmus: ForkServer, words: list[str], tmp_path: Path) -> None:
    words = [*words, "data.valid_fraction=0.2"]
    through, parts = tmp_path / "through", tmp_path / "parts"
    ended = isthmus(*words, "--out", through, "train.steps=10", "logging.tensorboard=false")
    steps = [row for row in rows(through) if "loss" in row]
    assert all(row.keys() >= REWARDS and row["consumed_sequences"] == 4 * row["step"] for row in steps)
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-4) and abs(steps[0]["rewards/margins"]) < 1e-5
    before, after = (row for row in rows(through) if "valid_loss" in row)
    assert before["valid_loss"] == pytest.approx(0.6931, abs=1e-4) and after["valid_loss"] < 0.5
    assert after["valid_rewards/accuracies"] == 1.0 and after["valid_rewards/margins"] > 0.5
    assert "accuracy 1.000" in ended.stderr
    assert "log-probabilities of 76 answers under the starting weights (train)" in ended.stderr

    assert isthmus(*words, "--out", parts, "train.steps=5").returncode == 0
    went_on = isthmus(*words, "--out", parts, "train.steps=10")
    assert "resumed from" in went_on.stderr and "reference:" not in went_on.stderr
    assert (parts / "hf/model.safetensors").read_bytes() == (through / "hf/model.safetensors").read_bytes()
    # Without what was kept, the model folder gives the same.
    (parts / "reference.npz").unlink()
    assert "log-probabilities of 76 answers" in isthmus(*words, "--out", parts, "train.steps=10").stderr
    assert (parts / "reference.npz").read_bytes() == (through / "reference.npz").read_bytes()


def test_what_is_refused_leaves_nothing(isthmus: ForkServer, words: list[str], chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = isthmus(*words, "--out", out, "--data", chats)
    assert ended.returncode == 65 and "among data of kind preference" in ended.stderr
    ended = isthmus(*words, "--out", out, "train.profile=900-901")
    assert ended.returncode == 2 and "goes beyond the 12 steps" in ended.stderr and "reference:" in ended.stderr
    assert not out.exists()
