"""Copies of the state in memory: machines are killed, and runs continue bit for bit without a checkpoint on a disk."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from faults.command import CompletedCommand, rows
from faults.fork_server import ForkServer, RunningRanks
from faults.hosts import rank_variables

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "dp2": (1, []),
    "dp4": (2, []),
    "tp2": (2, ["parallel.tp=2"]),
    "fsdp": (2, ["parallel.fsdp=true"]),
    "pp2": (2, ["parallel.pp=2"]),
    "background": (2, ["checkpoint.async=true", "train.precision=bf16"]),
}
"""Ranks of each of two machines, and settings."""


class Machines:
    """Machines with a memory folder each, of two ranks or one."""

    def __init__(
        self,
        isthmus: ForkServer,
        args: Sequence[str],
        folder: Path,
        count: int = 2,
        ranks_here: int = 2,
        steps: int = 6,
    ) -> None:
        self._ranks_here = ranks_here
        self._isthmus, self._args = isthmus, [*args, f"train.steps={steps}", "checkpoint.memory_every=1"]
        self.memory = [folder / f"memory-{number}" for number in range(count)]
        for path in self.memory:
            path.mkdir()

    def start(self, *more: str, blocked: int | None = None) -> RunningRanks:
        """Start all ranks; those of the machine ``blocked`` block in step 3."""
        here = self._ranks_here
        variables = rank_variables(here * len(self.memory))
        hosts = []
        for number, path in enumerate(self.memory):
            args = [*self._args, f"checkpoint.memory_dir={path}", *more]
            fault = {"FAULT": "sleep"} if number == blocked else {}
            local = [{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(here), **fault} for rank in range(here)]
            hosts.append([(args, variables[here * number + rank] | local[rank]) for rank in range(here)])
        return self._isthmus.start_ranks(hosts)

    def wait_for_copy(self, running: RunningRanks, step: int) -> None:
        while not all(self.copies(number) == [f"iter_{step:07d}"] for number in range(len(self.memory))):
            assert running.running()
            time.sleep(0.05)

    def copies(self, number: int) -> list[str]:
        return sorted(path.name for path in self.memory[number].glob("*/*"))

    def lose(self, running: RunningRanks, *numbers: int) -> list[CompletedCommand]:
        """Kill all processes of machines; others that replace them have empty memory."""
        for number in numbers:
            for rank in range(self._ranks_here):
                running.send(self._ranks_here * number + rank, signal.SIGKILL)
        completed = running.wait()
        for number in numbers:
            shutil.rmtree(self.memory[number])
            self.memory[number].mkdir()
        return completed


def losses(out: Path) -> list[Any]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows(out) if "loss" in row]


def weights(out: Path) -> bytes:
    return (out / "hf" / "model.safetensors").read_bytes()


@pytest.fixture
def undisturbed(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> Any:
    def run(ranks: int, *more: str) -> Path:
        out = tmp_path / "undisturbed"
        args = [*sft_args, "--out", str(out), "train.steps=6", *more]
        completed = isthmus.start_ranks([[(args, variables) for variables in rank_variables(ranks)]]).wait()
        assert [item.returncode for item in completed] == [0] * ranks, completed
        return out

    return run


@pytest.mark.thorough_cases("dp4", "tp2", "fsdp", "pp2", "background")
@pytest.mark.parametrize(("ranks_here", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_lost_machine(
    ranks_here: int, layout: list[str], isthmus: ForkServer, sft_args: list[str], undisturbed: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    machines = Machines(isthmus, [*sft_args, *layout], tmp_path, ranks_here=ranks_here)
    running = machines.start(blocked=1)
    machines.wait_for_copy(running, 2)
    first, *others = machines.lose(running, 1)
    assert {item.returncode for item in [first, *others[: ranks_here - 1]]} == {76}, first
    assert "copies in memory: every 1 step, on 2 machines, each also with those of a peer" in first.stderr
    assert not list(out.glob("checkpoints/iter_*"))

    completed = machines.start().wait()
    assert {item.returncode for item in completed} == {0}, completed
    assert "resuming from the copy of step 2 in memory, which is newer than the start" in completed[0].stderr
    expected = undisturbed(2 * ranks_here, *layout)
    assert losses(out) == losses(expected) and weights(out) == weights(expected)
    assert not any(list(path.iterdir()) for path in machines.memory)  # the run has ended


@pytest.mark.thorough
def test_lost_pair_of_machines(isthmus: ForkServer, sft_args: list[str], undisturbed: Any, tmp_path: Path) -> None:
    """Of four machines, two that keep each other's files are lost, then two that do not."""
    out = tmp_path / "out"
    machines = Machines(isthmus, sft_args, tmp_path, count=4, ranks_here=1)
    running = machines.start(blocked=1)
    machines.wait_for_copy(running, 2)
    machines.lose(running, 1, 3)
    running = machines.start(blocked=1)
    machines.wait_for_copy(running, 2)
    first = machines.lose(running, 1, 2)[0]
    lacking = "the machines do not have all files of the copy of step 2 in memory: resuming from the start"
    assert lacking in first.stderr, first
    completed = machines.start().wait()
    assert [item.returncode for item in completed] == [0] * 4, completed
    assert "resuming from the copy of step 2 in memory" in completed[0].stderr
    assert losses(out) == losses(undisturbed(4))


@pytest.mark.thorough
def test_rollouts_of_a_copy(isthmus: ForkServer, model: Path, tmp_path: Path) -> None:
    """Copies of a run with answers that earlier weights generate are fetched whole."""
    reward = "def parity(completion_ids, **_):\n    return [float(sum(ids) % 2) for ids in completion_ids]\n"
    (tmp_path / "rewards.py").write_text(reward)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say the number {number}."}) + "\n" for number in range(20)))
    args = ["grpo", "--model", str(model), "--data", str(prompts), "--json", "train.precision=fp32", "train.steps=12"]
    args += ["data.seq_length=64", "train.global_batch_size=4", "rollout.group_size=4", "rollout.max_new_tokens=6"]
    args += ["rollout.ahead=1", "grpo.correction=token", f"rollout.reward={tmp_path / 'rewards.py'}:parity"]
    machines = Machines(isthmus, [*args, "--out", str(tmp_path / "out")], tmp_path, ranks_here=1, steps=12)
    running = machines.start()
    while not all(any(name.startswith("iter_") for name in machines.copies(number)) for number in range(2)):
        assert running.running()
        time.sleep(0.01)
    running.send(0, signal.SIGKILL)
    machines.lose(running, 1)
    completed = machines.start().wait()
    assert [item.returncode for item in completed] == [0, 0], completed
    assert "resuming from the copy of step" in completed[0].stderr

    expected = tmp_path / "undisturbed"
    ranks = [([*args, "--out", str(expected)], variables) for variables in rank_variables(2)]
    assert [item.returncode for item in isthmus.start_ranks([ranks]).wait()] == [0, 0]
    assert losses(tmp_path / "out") == losses(expected)


@pytest.mark.parametrize("small_disk", ["1000k"], indirect=True)
def test_full_memory(isthmus: ForkServer, sft_args: list[str], small_disk: Path) -> None:
    """The estimate fits, and the files of so small a model, which are larger, do not."""
    completed = isthmus(*sft_args, "checkpoint.memory_every=1", f"checkpoint.memory_dir={small_disk}")
    assert completed.returncode == 73, completed
    assert f"no room for the copy of step 2 in {small_disk}" in completed.errors[0]
    assert "leave checkpoint.memory_every out; the copy before it is intact" in completed.errors[0]


def test_a_run_continues_on_fewer_and_on_more_machines(
    isthmus: ForkServer, sft_args: list[str], undisturbed: Any, tmp_path: Path
) -> None:
    """From copies in memory on 1 of 2 ranks, then from a checkpoint on 3 ranks, of which 1 ends."""
    out, elastic = tmp_path / "out", "parallel.elastic=true"
    machines = Machines(isthmus, [*sft_args, elastic], tmp_path, ranks_here=1)
    running = machines.start(blocked=1)
    machines.wait_for_copy(running, 2)
    machines.lose(running, 1)
    machines.memory.pop()
    running = machines.start("checkpoint.every=4", "checkpoint.save_final=false", "checkpoint.export_final=false")
    completed = running.wait()
    assert [item.returncode for item in completed] == [0], completed
    assert "elastic: 1 of 1 ranks, tp=1 pp=1 dp=1, train.micro_batch_size=1; train.global_batch_size=4 and" in (
        completed[0].stderr
    )
    assert "resuming from the copy of step 2 in memory" in completed[0].stderr

    variables = rank_variables(3)
    again = [*sft_args, elastic, "train.steps=6"]
    completed = isthmus.start_ranks([[(again, rank) for rank in variables]]).wait()
    assert [item.returncode for item in completed] == [0] * 3, completed
    assert "elastic: 2 of 3 ranks" in completed[0].stderr and "resumed from" in completed[0].stderr
    assert completed[2].stderr.splitlines() == [
        "rank 2 ends: train.global_batch_size=4 fits 2 of 3 ranks (parallel.elastic)"
    ]
    expected = losses(undisturbed(1))
    assert [row[0] for row in losses(out)] == [row[0] for row in expected] == [1, 2, 3, 4, 5, 6]
    for row, reference in zip(losses(out), expected, strict=True):
        assert row[1:] == pytest.approx(reference[1:], rel=1e-5)
