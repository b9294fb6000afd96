"""Signals, killed ranks and divergence: what is saved and reported, and how the run resumes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from faults.command import rows
from faults.fork_server import ForkServer, RunningRanks
from faults.hosts import rank_variables

pytestmark = pytest.mark.ranks
STEPS = 20


def wait_for_step(command: RunningRanks, run_folder: Path, step: int, timeout_s: float = 90.0) -> None:
    metrics = run_folder / "metrics.jsonl"
    deadline = time.monotonic() + timeout_s
    while not metrics.exists() or f'"step": {step}, "loss"' not in metrics.read_text():
        assert command.running() and time.monotonic() < deadline, command.result()
        time.sleep(0.02)


def ranks_of(command: RunningRanks) -> list[psutil.Process]:
    """The processes of the ranks of a command, by rank."""
    children = psutil.Process(command.pids[0]).children(recursive=True)
    values = {rank: child for child in children if (rank := child.environ().get("RANK")) is not None}
    return [values[rank] for rank in sorted(values)]


def has_ended(process: psutil.Process) -> bool:
    """Whether the process has ended; init may not have reaped it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def checkpoints(run_folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in (run_folder / "checkpoints").glob("iter_*"))


def two_ranks(isthmus: ForkServer, args: list[str], layout: str = "parallel.tp=2") -> RunningRanks:
    """Start two ranks without the launcher, which imports everything again in each: ten seconds of a CPU."""
    return isthmus.start_ranks([[([*args, layout], variables) for variables in rank_variables(2)]])


def test_signal_saves_and_the_same_command_finishes(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    """The launcher sends the signal to the ranks: test_launch.py; another layout: tests/ranks/test_checkpoint.py."""
    out = tmp_path / "out"
    sft_args.append(f"train.steps={STEPS}")
    process = two_ranks(isthmus, sft_args)
    wait_for_step(process, out, 2)
    for rank in range(2):
        process.send(rank, signal.SIGTERM)
    stopped, other = process.wait()
    assert (stopped.returncode, other.returncode) == (75, 75), stopped
    (step,) = checkpoints(out)
    assert 2 <= step < STEPS
    assert stopped.errors[-1].startswith(f"isthmus: stopped after step {step} of {STEPS}") and not stopped.stdout
    assert len(stopped.errors) == 1 and not other.errors
    assert not (out / "hf").exists() and not list(out.rglob(".tmp*"))

    again, _ = two_ranks(isthmus, sft_args).wait()
    assert again.result["steps"] == STEPS and f"at step {step}" in again.stderr
    assert [row["step"] for row in rows(out) if "loss" in row] == list(range(1, STEPS + 1))
    assert (out / "hf" / "model.safetensors").is_file()


def test_signal_to_a_single_process(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = isthmus.start(*sft_args, "train.steps=2000")
    wait_for_step(process, out, 3)
    process.send(0, signal.SIGTERM)
    process.send(0, signal.SIGTERM)  # like batch systems
    stopped = process.result()
    line = stopped.error(75)
    assert stopped.errors[0] == "isthmus: SIGTERM: saving after this step." and len(stopped.errors) == 2
    (step,) = checkpoints(out)
    assert f"after step {step} of" in line
    beyond = isthmus(*sft_args, f"train.steps={step - 1}").error(2)
    assert "train.steps" in beyond and str(step) in beyond
    assert isthmus(*sft_args, f"train.steps={step + 2}").result["steps"] == step + 2


@pytest.mark.thorough_cases("parallel.pp=1")
@pytest.mark.parametrize("layout", [None, "parallel.pp=1", "parallel.pp=2"], ids=str)
def test_long_step_is_abandoned_within_the_grace_period(
    isthmus: ForkServer, sft_args: list[str], tmp_path: Path, layout: str | None
) -> None:
    """Between two micro batches, or beside the step of pipeline stages.

    The resumed run equals one that was not stopped, and repeats the export.
    """
    sft_args += ["train.steps=3", "train.global_batch_size=16", "train.micro_batch_size=1"]
    args = [*sft_args, "data.packing=false", "checkpoint.grace_s=0.02", "--hf-every", "1"]

    def run(*more: str) -> RunningRanks:
        return isthmus.start(*args, *more) if layout is None else two_ranks(isthmus, [*args, *more], layout)

    process = run()
    wait_for_step(process, tmp_path / "out", 1)
    for rank in range(len(process.pids)):
        process.send(rank, signal.SIGTERM)
    stopped = process.wait()
    assert {rank.returncode for rank in stopped} == {75}
    assert "was not completed); the state is saved" in stopped[0].errors[-1], stopped
    (step,) = checkpoints(tmp_path / "out")
    shutil.rmtree(tmp_path / f"out/hf-step-{step:07d}", ignore_errors=True)  # as if stopped in the export
    assert run().wait()[0].result["steps"] == 3
    assert sorted(path.name for path in (tmp_path / "out").glob("hf-*")) == ["hf-step-0000001", "hf-step-0000002"]
    run("--out", str(tmp_path / "whole")).wait()
    losses = [[row["loss"] for row in rows(tmp_path / name) if "loss" in row] for name in ("out", "whole")]
    assert step in (1, 2) and len(losses[0]) == 3 and losses[0] == losses[1]


def test_signal_after_the_last_step_keeps_the_state(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    """Evaluation and export are repeated."""
    args = [*sft_args, "data.valid_fraction=0.5", "train.micro_batch_size=1", "checkpoint.grace_s=0.001"]
    process = isthmus.start(*args)
    wait_for_step(process, tmp_path / "out", 4)
    process.send(0, signal.SIGTERM)
    assert "after step 4 of 4" in process.result().error(75) or not (tmp_path / "out/hf").exists()
    assert checkpoints(tmp_path / "out") == [4] and not (tmp_path / "out/hf").exists()
    assert isthmus(*args).result["steps"] == 4 and (tmp_path / "out/hf/model.safetensors").is_file()


def test_background_saves_survive_kills_and_end_with_the_run(
    isthmus: ForkServer, sft_args: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    args = [*sft_args, "checkpoint.async=true", "checkpoint.every=1"]
    process = isthmus.start(*args, "train.steps=2000")
    wait_for_step(process, out, 6)
    process.send(0, signal.SIGKILL)
    process.result()
    # checkpoint.keep, and one more if the kill came between the newest checkpoint and the removal of the oldest.
    assert len(checkpoints(out)) in (1, 2, 3)
    process = isthmus.start(*args, "train.steps=2000")
    wait_for_step(process, out, 9)
    process.send(0, signal.SIGTERM)
    stopped = process.result()
    assert f"after step {checkpoints(out)[-1]} of" in stopped.error(75)
    assert not list((out / "checkpoints").glob(".tmp*")), stopped
    last = checkpoints(out)[-1] + 2
    assert isthmus(*args, f"train.steps={last}").result["steps"] == last == checkpoints(out)[-1]


@pytest.mark.thorough
def test_killed_rank_ends_the_run_and_the_run_resumes(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = isthmus.start(*sft_args, "--nproc", "2", "parallel.tp=2", "train.steps=5000", "checkpoint.every=4")
    wait_for_step(process, out, 13)
    first, second = ranks_of(process)
    second.suspend()
    time.sleep(0.5)  # the first rank now waits in a collective
    second.kill()
    started_s = time.monotonic()
    completed = process.result()
    assert "rank 1 was ended by SIGKILL" in completed.error(137) and has_ended(first)
    assert time.monotonic() - started_s < 60
    saved = checkpoints(out)
    assert len(saved) == 2 and saved[-1] >= 12  # checkpoint.keep
    again = isthmus(*sft_args, f"train.steps={saved[-1] + 3}")
    assert f"at step {saved[-1]}" in again.stderr and again.result["steps"] == saved[-1] + 3


@pytest.mark.thorough
def test_no_rank_outlives_a_killed_command(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    process = isthmus.start(*sft_args, "--nproc", "2", "parallel.tp=2", "train.steps=5000")
    wait_for_step(process, tmp_path / "out", 3)
    ranks = ranks_of(process)
    process.send(0, signal.SIGKILL)
    process.result()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    for rank in alive:
        rank.kill()
    assert not alive
    assert len(checkpoints(tmp_path / "out")) == 1 and not list((tmp_path / "out").rglob(".tmp*"))


@pytest.mark.thorough
def test_bad_data_is_reported_once(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    data = tmp_path / "bad.json"
    data.write_text('[{"instruction": "a", "output": "b"}, 7]')
    started_s = time.monotonic()
    line = isthmus(*sft_args, "--nproc", "2", "--data", data).error(65)
    assert str(data) in line and time.monotonic() - started_s < 120
    assert not (tmp_path / "out").exists()


def test_bad_data_under_another_launcher_is_reported_once_and_ends_all_ranks(
    isthmus: ForkServer, sft_args: list[str], tmp_path: Path
) -> None:
    """Like srun: rank 0 reads the data and hosts the store, the others wait."""
    data = tmp_path / "bad.json"
    data.write_text('[{"instruction": "a", "output": "b"}, 7]')
    completed = two_ranks(isthmus, [*sft_args, "--data", str(data)]).wait()
    assert [item.returncode for item in completed] == [65, 65], completed
    (line,) = [line for item in completed for line in item.errors]
    assert f"{data}:1" in line and not (tmp_path / "out").exists()


def test_full_disk_of_one_rank_is_reported_once(isthmus: ForkServer, sft_args: list[str], small_disk: Path) -> None:
    ranks = two_ranks(isthmus, [*sft_args, "--out", str(small_disk / "out")]).wait()
    assert [rank.returncode for rank in ranks] == [73, 73], ranks
    (line,) = [line for rank in ranks for line in rank.errors]
    assert "checkpoint" in line and not list((small_disk / "out" / "checkpoints").iterdir())


@pytest.mark.thorough
@pytest.mark.parametrize("small_disk", ["8m"], indirect=True)
def test_full_disk_in_the_background_ends_the_run(isthmus: ForkServer, sft_args: list[str], small_disk: Path) -> None:
    args = [*sft_args, "--out", str(small_disk / "out"), "checkpoint.async=true"]
    running = two_ranks(isthmus, [*args, "checkpoint.every=1", "train.steps=2000", "logging.to=[]"])
    wait_for_step(running, small_disk / "out", 3)
    with suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(b"0" * 4096)
    failed = running.wait()
    (line,) = [line for rank in failed for line in rank.errors]
    assert [rank.returncode for rank in failed] == [73, 73] and "checkpoint" in line, failed
    (small_disk / "filler").unlink()
    step = int((small_disk / "out/checkpoints/latest_checkpointed_iteration.txt").read_text())
    again, _ = two_ranks(isthmus, [*args, f"train.steps={step + 1}"]).wait()
    assert f"at step {step}" in again.stderr and again.result["steps"] == step + 1


@pytest.mark.thorough
def test_divergence_on_two_ranks(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    args = [*sft_args, "--nproc", "2", "parallel.tp=2", "optim.lr=1e30", "optim.clip_grad=0"]
    line = isthmus(*args).error(79)
    assert "optim.lr" in line and not (tmp_path / "out" / "hf").exists()


@pytest.mark.parametrize("lr", ["1e9", "1e30"])
def test_divergence(isthmus: ForkServer, sft_args: list[str], tmp_path: Path, lr: str) -> None:
    line = isthmus(*sft_args, f"optim.lr={lr}", "train.steps=12").error(79)
    assert "optim.lr" in line
    assert not (tmp_path / "out" / "hf").exists() and not checkpoints(tmp_path / "out")


def test_divergence_in_the_last_step_is_not_exported(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    line = isthmus(*sft_args, "optim.lr=3.4e38", "train.steps=1").error(79)
    assert "validation" in line and not (tmp_path / "out" / "hf").exists() and not checkpoints(tmp_path / "out")


@pytest.mark.parametrize("valid_fraction", ["0.02", "0.0"])
def test_nan_in_the_weights(
    isthmus: ForkServer, sft_args: list[str], model: Path, tmp_path: Path, valid_fraction: str
) -> None:
    from safetensors.torch import load_file, save_file

    broken = Path(shutil.copytree(model, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 3] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    line = isthmus(*sft_args, "--model", broken, f"data.valid_fraction={valid_fraction}").error(79)
    assert "nan" in line and not (tmp_path / "out" / "hf").exists()
    assert all(json.loads(text) for text in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())


def test_environment_of_a_shell_has_no_ranks() -> None:
    """The tests of ``--nproc`` need an environment without rank variables."""
    assert "RANK" not in os.environ
