"""Complete DPO runs: metrics, messages, files, resume and refused inputs."""

from __future__ import annotations

import json
import re
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
    """Preference pairs: the chosen answers are whole sentences."""
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
def args(model: Path, pairs: Path) -> list[str]:
    settings = ["train.global_batch_size=4", "train.micro_batch_size=2", "optim.lr=1e-3", "optim.schedule=constant"]
    return ["dpo", "--model", str(model), "--data", str(pairs), "--json", "train.precision=fp32", *settings]


def test_metrics_and_resume(isthmus: ForkServer, args: list[str], tmp_path: Path) -> None:
    args = [*args, "data.valid_fraction=0.2"]
    uninterrupted, interrupted = tmp_path / "uninterrupted", tmp_path / "interrupted"
    completed = isthmus(*args, "--out", uninterrupted, "train.steps=10", "logging.to=[]")
    steps = [row for row in rows(uninterrupted) if "loss" in row]
    assert all(row.keys() >= REWARDS and row["consumed_sequences"] == 4 * row["step"] for row in steps)
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-4) and abs(steps[0]["rewards/margins"]) < 1e-5
    before, after = (row for row in rows(uninterrupted) if "valid_loss" in row)
    assert before["valid_loss"] == pytest.approx(0.6931, abs=1e-4) and after["valid_loss"] < 0.5
    assert after["valid_rewards/accuracies"] == 1.0 and after["valid_rewards/margins"] > 0.5
    assert re.search(r"acc 1\.000", completed.stderr)
    assert "log-probabilities of 76 answers under the starting weights (train)" in completed.stderr

    assert isthmus(*args, "--out", interrupted, "train.steps=5").returncode == 0
    resumed = isthmus(*args, "--out", interrupted, "train.steps=10")
    assert "resumed from" in resumed.stderr and "reference:" not in resumed.stderr
    assert (interrupted / "hf/model.safetensors").read_bytes() == (uninterrupted / "hf/model.safetensors").read_bytes()
    # Without reference.npz, the reference is computed again from the model folder.
    (interrupted / "reference.npz").unlink()
    assert "log-probabilities of 76 answers" in isthmus(*args, "--out", interrupted, "train.steps=10").stderr
    assert (interrupted / "reference.npz").read_bytes() == (uninterrupted / "reference.npz").read_bytes()


def test_refused_inputs_leave_no_run_folder(isthmus: ForkServer, args: list[str], chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    completed = isthmus(*args, "--out", out, "--data", chats)
    assert completed.returncode == 65 and "among data of kind preference" in completed.stderr
    completed = isthmus(*args, "--out", out, "train.profile=900-901")
    assert (
        completed.returncode == 2
        and "goes beyond the 12 steps" in completed.stderr
        and "reference:" in completed.stderr
    )
    assert not out.exists()
