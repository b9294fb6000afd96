"""Signals, deaths and divergence of real runs: what is saved and reported, and that the run resumes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from faults.command import finished, rows, start
from faults.fork_server import ForkServer, Started

pytestmark = pytest.mark.ranks
STEPS = 60


def wait_for_step(command: Started, run_folder: Path, step: int, timeout_s: float = 90.0) -> None:
    metrics = run_folder / "metrics.jsonl"
    deadline = time.monotonic() + timeout_s
    while not metrics.exists() or f'"step": {step}, "loss"' not in metrics.read_text():
        assert command.running() and time.monotonic() < deadline, command.result()
        time.sleep(0.02)


def ranks_of(command: Started) -> list[psutil.Process]:
    """The ranks that the command has started, in order."""
    children = psutil.Process(command.pids[0]).children(recursive=True)
    found = {rank: child for child in children if (rank := child.environ().get("RANK")) is not None}
    return [found[rank] for rank in sorted(found)]


def has_ended(process: psutil.Process) -> bool:
    """Whether the process runs no more; init may not have reaped it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def checkpoints(run_folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in (run_folder / "checkpoints").glob("iter_*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_the_same_command_finishes(
    isthmus: ForkServer, small: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "out"
    small.append(f"train.steps={STEPS}")
    words = [*small, "--nproc", "2", "parallel.tp=2"]
    process = isthmus.start(*words)
    wait_for_step(process, out, 5)
    process.send(0, number)
    stopped = process.result()
    assert stopped.returncode == 75, stopped
    (step,) = checkpoints(out)
    assert 5 <= step < STEPS
    assert stopped.errors[-1].startswith(f"isthmus: stopped after step {step} of {STEPS}") and not stopped.stdout
    assert len(stopped.errors) == 2 and number.name in stopped.errors[0]
    assert not (out / "hf").exists() and not list(out.rglob(".tmp*"))

    # Once with the same command, once on a single rank: a checkpoint resumes under any layout.
    again = isthmus(*words) if number == signal.SIGTERM else isthmus(*small)
    assert again.result["steps"] == STEPS and f"at step {step}" in again.stderr
    assert [row["step"] for row in rows(out) if "loss" in row] == list(range(1, STEPS + 1))
    assert (out / "hf" / "model.safetensors").is_file()


def test_signal_to_a_single_process(isthmus: ForkServer, small: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = isthmus.start(*small, "train.steps=2000")
    wait_for_step(process, out, 3)
    process.send(0, signal.SIGTERM)
    process.send(0, signal.SIGTERM)  # as batch systems do
    line = process.result().error(75)
    (step,) = checkpoints(out)
    assert f"after step {step} of" in line
    beyond = isthmus(*small, f"train.steps={step - 1}").error(2)
    assert "train.steps" in beyond and str(step) in beyond
    assert isthmus(*small, f"train.steps={step + 2}").result["steps"] == step + 2


def test_killed_rank_ends_the_run_soon_and_the_run_resumes(
    isthmus: ForkServer, small: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = isthmus.start(*small, "--nproc", "2", "parallel.tp=2", "train.steps=5000", "checkpoint.every=4")
    wait_for_step(process, out, 13)
    first, second = ranks_of(process)
    second.suspend()
    time.sleep(0.5)  # by now the first waits for it in a collective
    second.kill()
    started_s = time.monotonic()
    ended = process.result()
    assert "rank 1 was ended by SIGKILL" in ended.error(137) and has_ended(first)
    assert time.monotonic() - started_s < 20
    saved = checkpoints(out)
    assert len(saved) == 2 and saved[-1] >= 12  # checkpoint.keep
    again = isthmus(*small, f"train.steps={saved[-1] + 3}")
    assert f"at step {saved[-1]}" in again.stderr and again.result["steps"] == saved[-1] + 3


def test_no_rank_outlives_a_killed_command(isthmus: ForkServer, small: list[str], tmp_path: Path) -> None:
    process = isthmus.start(*small, "--nproc", "2", "parallel.tp=2", "train.steps=5000")
    wait_for_step(process, tmp_path / "out", 3)
    ranks = ranks_of(process)
    process.send(0, signal.SIGKILL)
    process.result()
    _, left = psutil.wait_procs(ranks, timeout=30)
    for rank in left:
        rank.kill()
    assert not left
    assert len(checkpoints(tmp_path / "out")) == 1 and not list((tmp_path / "out").rglob(".tmp*"))


def test_bad_data_on_the_rank_that_reads_it_is_reported_once(
    isthmus: ForkServer, small: list[str], tmp_path: Path
) -> None:
    data = tmp_path / "bad.json"
    data.write_text('[{"instruction": "a", "output": "b"}, 7]')
    started_s = time.monotonic()
    line = isthmus(*small, "--nproc", "2", "--data", data).error(65)
    assert str(data) in line and time.monotonic() - started_s < 60
    assert not (tmp_path / "out").exists()


def test_bad_data_under_another_launcher_is_reported_once_and_ends_all_ranks(small: list[str], tmp_path: Path) -> None:
    """As srun does it: rank 0 reads the data and serves the store, the others wait."""
    data = tmp_path / "bad.json"
    data.write_text('[{"instruction": "a", "output": "b"}, 7]')
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    ranks = [start(*small, "--data", str(data), cwd=tmp_path, RANK=rank, LOCAL_RANK=rank, **world) for rank in "01"]
    ended = [finished(rank, timeout_s=60) for rank in ranks]
    assert [one.returncode for one in ended] == [65, 65], ended
    (line,) = [line for one in ended for line in one.errors]
    assert f"{data}:1" in line and not (tmp_path / "out").exists()


def test_full_disk_of_one_rank_is_reported_once(isthmus: ForkServer, small: list[str], tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no small file system: mount is not allowed; run as root to test a full disk")
    try:
        ended = isthmus(*small, "--nproc", "2", "parallel.tp=2", "--out", disk / "out")
        assert "checkpoint" in ended.error(73)
        assert not list((disk / "out" / "checkpoints").iterdir())
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_divergence_on_two_ranks(isthmus: ForkServer, small: list[str], tmp_path: Path) -> None:
    words = [*small, "--nproc", "2", "parallel.tp=2", "optim.lr=1e30", "optim.clip_grad=0"]
    line = isthmus(*words).error(79)
    assert "optim.lr" in line and not (tmp_path / "out" / "hf").exists()


@pytest.mark.parametrize("lr", ["1e9", "1e30"])
def test_divergence(isthmus: ForkServer, small: list[str], tmp_path: Path, lr: str) -> None:
    line = isthmus(*small, f"optim.lr={lr}", "train.steps=12").error(79)
    assert "optim.lr" in line
    assert not (tmp_path / "out" / "hf").exists() and not checkpoints(tmp_path / "out")


def test_divergence_in_the_last_step_is_not_exported(isthmus: ForkServer, small: list[str], tmp_path: Path) -> None:
    line = isthmus(*small, "optim.lr=3.4e38", "train.steps=1").error(79)
    assert "validation" in line and not (tmp_path / "out" / "hf").exists() and not checkpoints(tmp_path / "out")


@pytest.mark.parametrize("held_out", ["0.02", "0.0"])
def test_weight_that_is_no_number(
    isthmus: ForkServer, small: list[str], model: Path, tmp_path: Path, held_out: str
) -> None:
    from safetensors.torch import load_file, save_file

    broken = Path(shutil.copytree(model, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 3] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    line = isthmus(*small, "--model", broken, f"data.valid_fraction={held_out}").error(79)
    assert "nan" in line and not (tmp_path / "out" / "hf").exists()
    assert all(json.loads(text) for text in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())


def test_environment_of_a_shell_has_no_ranks() -> None:
    """The tests above would say nothing about ``--nproc`` if they ran as ranks themselves."""
    assert "RANK" not in os.environ
