"""Complete runs of a reward model: metrics, resume, scores in transformers, and refused inputs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from faults.command import rows
from faults.fork_server import ForkServer
from isthmus.hf.tokenizer.tokenizer_kinds import open_tokenizer


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    records = [
        {
            "prompt": f"Say the number {number}.",
            "chosen": f"The number is {number}.",
            "rejected": f"{number}, as I say the number.",
            "margin": number % 3 / 10,
        }
        for number in range(24)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def scores(folder: Path, records: list[dict[str, str]]) -> torch.Tensor:
    """The scores of the chosen and the rejected answer of each record, [records, 2], by transformers."""
    tokenizer = open_tokenizer(folder)
    network = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    results = []
    for record, answer in itertools.product(records, ("chosen", "rejected")):
        turns = [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record[answer]}]
        tokens = tokenizer.encode_batch([tokenizer.apply_chat_template(turns)])[0]
        with torch.no_grad():
            results.append(network(torch.tensor([tokens])).logits.item())
    return torch.tensor(results).view(-1, 2)


def test_training_resume_and_scores(isthmus: ForkServer, model: Path, pairs: Path, chats: Path, tmp_path: Path) -> None:
    settings = ["train.global_batch_size=4", "train.micro_batch_size=2", "optim.lr=1e-3", "optim.schedule=constant"]
    settings += ["train.precision=fp32", "data.valid_fraction=0.2", "--json", "--data", str(pairs)]
    args = ["reward", "--model", str(model), *settings]
    uninterrupted, interrupted = tmp_path / "uninterrupted", tmp_path / "interrupted"
    completed = isthmus(*args, "--out", uninterrupted, "train.steps=8", "logging.to=[]")
    assert completed.returncode == 0, completed.stderr
    assert "the score head is new: random, standard deviation 0.02" in completed.stderr
    before, after = (row for row in rows(uninterrupted) if "valid_loss" in row)
    assert after["valid_loss"] < before["valid_loss"] and after["valid_rewards/accuracies"] == 1.0

    assert isthmus(*args, "--out", interrupted, "train.steps=4").returncode == 0
    assert "resumed from" in isthmus(*args, "--out", interrupted, "train.steps=8").stderr
    exported = uninterrupted / "hf"
    assert (interrupted / "hf/model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()

    # The scores of the run, from the loss of a pair, are those of transformers.
    item = tmp_path / "one.jsonl"
    item.write_text(pairs.read_text().splitlines()[0] + "\n" + pairs.read_text().splitlines()[1] + "\n")
    again = ["reward", "--model", str(exported), "--json", "--out", str(tmp_path / "again"), "--data", str(item)]
    again += [
        "train.steps=1",
        "train.global_batch_size=2",
        "train.precision=fp32",
        "optim.lr=1e-9",
        "data.valid_fraction=0",
    ]
    assert isthmus(*again).returncode == 0
    (row,) = (row for row in rows(tmp_path / "again") if "loss" in row)
    chosen, rejected = scores(exported, [json.loads(line) for line in item.read_text().splitlines()]).mean(0).tolist()
    assert (row["rewards/chosen"], row["rewards/rejected"]) == pytest.approx((chosen, rejected), abs=1e-5)

    verified = isthmus("verify", exported, exported, "--logits")
    assert verified.returncode == 2 and "a reward model has scores and no logits" in verified.stderr
    refused = isthmus("sft", "--model", exported, "--data", chats, "--out", tmp_path / "out")
    assert refused.returncode == 2 and "is a reward model" in refused.stderr
    refused = isthmus("chat", exported)
    assert refused.returncode == 2 and "is a reward model: it scores texts and writes none" in refused.stderr
    assert "Traceback" not in refused.stderr
