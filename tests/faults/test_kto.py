"""Complete KTO runs: labels and pairs, metrics, resume and refused inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from faults.command import rows
from faults.fork_server import ForkServer


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """Answers with labels, and pairs."""
    path = tmp_path / "answers.jsonl"
    records: list[dict[str, object]] = []
    for number in range(30):
        label = number % 3 == 0
        said = f"The number is {number}." if label else f"{number}, as I say the number."
        records.append({"prompt": f"Say the number {number}.", "completion": said, "label": label})
    records.append({"prompt": "Say the number 7.", "chosen": "The number is 7.", "rejected": "7, 7."})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_metrics_resume_and_refused_inputs(
    isthmus: ForkServer, model: Path, answers: Path, chats: Path, tmp_path: Path
) -> None:
    settings = ["train.global_batch_size=4", "train.micro_batch_size=2", "optim.lr=1e-3", "optim.schedule=constant"]
    settings += ["train.precision=fp32", "data.valid_fraction=0.2", "--data", str(answers)]
    args = ["kto", "--model", str(model), "--json", *settings]
    uninterrupted, interrupted = tmp_path / "uninterrupted", tmp_path / "interrupted"
    completed = isthmus(*args, "--out", uninterrupted, "train.steps=8", "logging.to=[]")
    assert completed.returncode == 0
    assert "under the starting weights (train, mismatched)" in completed.stderr
    steps = [row for row in rows(uninterrupted) if "loss" in row]
    assert steps[0]["loss"] == pytest.approx(0.5, abs=1e-4) and steps[0]["kl"] == pytest.approx(0, abs=1e-4)
    assert any("rewards/margins" in row for row in steps) and all("kl" in row for row in steps)
    before, after = (row for row in rows(uninterrupted) if "valid_loss" in row)
    assert before["valid_loss"] == pytest.approx(0.5, abs=1e-4) and after["valid_loss"] < 0.49

    assert isthmus(*args, "--out", interrupted, "train.steps=4").returncode == 0
    resumed = isthmus(*args, "--out", interrupted, "train.steps=8")
    assert "resumed from" in resumed.stderr and "reference:" not in resumed.stderr
    assert (interrupted / "hf/model.safetensors").read_bytes() == (uninterrupted / "hf/model.safetensors").read_bytes()

    refused = isthmus(*args, "--out", tmp_path / "out", "--data", chats)
    assert refused.returncode == 65 and "Expected an answer with a label; sft trains on a chat record" in refused.stderr
    refused = isthmus(*args, "--out", tmp_path / "out", "dpo.beta=0.2")
    assert refused.returncode == 2 and "is for recipe dpo, got kto" in refused.stderr
