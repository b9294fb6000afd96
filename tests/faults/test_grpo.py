"""Complete runs of grpo: files, messages, and inputs that are refused or counted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from faults.command import rows
from faults.fork_server import ForkServer
from faults.hosts import rank_variables

REWARDS = """
import time

calls = []


def parity(completion_ids, **columns):
    return [float(sum(ids) % 2) for ids in completion_ids]


def equal(completions, **columns):
    return [1.0] * len(completions)


def raises(completions, **columns):
    return [text["no such key"] for text in completions]


def nan(completions, **columns):
    return [float("nan")] * len(completions)


def too_few(completions, **columns):
    return [1.0]


def hangs_later(completions, **columns):
    calls.append(len(completions))
    if len(calls) > 1:
        time.sleep(1000)
    return [1.0] * len(completions)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    (folder / "rewards.py").write_text(REWARDS)
    records = [{"prompt": f"Say the number {number}."} for number in range(20)]
    records.append({"prompt": "Say the number. " * 40})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def args(model: Path, folder: Path) -> list[str]:
    settings = ["data.seq_length=64", "train.global_batch_size=4", "rollout.group_size=4", "rollout.max_new_tokens=6"]
    files = ["--model", str(model), "--data", str(folder / "prompts.jsonl"), "--json"]
    return ["grpo", *files, "train.precision=fp32", "train.steps=3", *settings]


def reward(folder: Path, name: str) -> str:
    return f"rollout.reward={folder / 'rewards.py'}:{name}"


def test_run(isthmus: ForkServer, args: list[str], folder: Path, tmp_path: Path) -> None:
    completed = isthmus(*args, "--out", tmp_path / "run", reward(folder, "parity"), "rollout.samples_every=1")
    assert completed.returncode == 0, completed.stderr
    assert "21 records -> 20 samples" in completed.stderr and "1 dropped as too long" in completed.stderr
    assert "reward " in completed.stderr and "length " in completed.stderr
    steps = [row for row in rows(tmp_path / "run") if "loss" in row]
    match = re.search(
        r"training: 3 steps, .*, up to ([\d,]+) tokens per step \(answers of 6 tokens\)", completed.stderr
    )
    assert match and max(row["num_tokens"] for row in steps) <= int(match[1].replace(",", "")) + 4  # prompts differ
    assert all(0 <= row["reward"] <= 1 and row["logp_difference_max"] < 1e-4 for row in steps)
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in samples} == {0, 1, 2}
    assert samples[0]["prompt"].startswith("Say the number ") and samples[0]["rewards"].keys() == {"parity"}
    card = (tmp_path / "run/hf/README.md").read_text()
    assert "12 sequences, at most " in card
    assert "trained with reinforcement learning (GRPO) on rewards of its own answers" in card


def test_equal_rewards_are_reported(isthmus: ForkServer, args: list[str], folder: Path, tmp_path: Path) -> None:
    completed = isthmus(*args, "--out", tmp_path / "run", reward(folder, "equal"))
    assert completed.returncode == 0 and "step 1: the rewards of each group are equal" in completed.stderr
    (first, *_) = [row for row in rows(tmp_path / "run") if "loss" in row]
    assert (first["loss"], first["grad_norm"], first["groups_without_variance"]) == (0, 0, 1)


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("raises", 2, "rewards.py"),
        ("nan", 2, "Expected a finite number"),
        ("too_few", 2, "1 reward for"),
        ("missing", 66, "missing"),
    ],
)
def test_bad_rewards(
    name: str, code: int, message: str, isthmus: ForkServer, args: list[str], folder: Path, tmp_path: Path
) -> None:
    completed = isthmus(*args, "--out", tmp_path / "run", reward(folder, name), "data.valid_fraction=0")
    assert completed.returncode == code and message in completed.stderr, completed.stderr
    if name == "missing":
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_reward_that_hangs_ends_the_run(
    nproc: int, isthmus: ForkServer, args: list[str], folder: Path, tmp_path: Path
) -> None:
    command = [*args, "--out", str(tmp_path / "run"), reward(folder, "hangs_later"), "rollout.timeout_s=2"]
    command.append("data.valid_fraction=0")
    ranks = [{}] if nproc == 1 else rank_variables(nproc)
    completed = isthmus.start_ranks([[(command, variables) for variables in ranks]]).wait()
    assert {rank.returncode for rank in completed} == {76}, completed
    stderr = "".join(rank.stderr for rank in completed)
    assert "hangs_later did not finish" in stderr and "rollout.timeout_s=2" in stderr


def test_a_slow_generation_ends_the_run(isthmus: ForkServer, args: list[str], folder: Path, tmp_path: Path) -> None:
    command = [*args, "--out", tmp_path / "run", reward(folder, "parity"), "rollout.timeout_s=0.01"]
    completed = isthmus(*command, "rollout.max_new_tokens=40", "data.valid_fraction=0")
    assert completed.returncode == 76
    assert "the generation of step 1 takes longer than rollout.timeout_s=0.01" in completed.stderr


def test_prompts_without_room_for_an_answer(isthmus: ForkServer, args: list[str], folder: Path, tmp_path: Path) -> None:
    completed = isthmus(*args, "--out", tmp_path / "run", reward(folder, "parity"), "rollout.max_new_tokens=60")
    assert completed.returncode == 65 and "no sample is left to train on" in completed.stderr
    assert not (tmp_path / "run").exists()
