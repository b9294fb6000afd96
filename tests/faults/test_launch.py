"""Messages and exit codes of ``--nproc 2`` when a rank fails or a signal arrives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from faults.command import CompletedCommand
from faults.fork_server import ForkServer, RunningRanks

SOURCE = Path(__file__).parents[2] / "src"

# Replaces the recipe in every process with this folder on its path; the ranks do not import torch.
STUB = """
import os, sys, time, types

def run(config):
    import pathlib
    from isthmus.errors import DataError, Preempted
    from isthmus.train.stop import StopFlag
    rank, mode = int(os.environ.get("RANK", "0")), os.environ["STUB"]
    assert "RANK" not in os.environ or "torch" not in sys.modules, "a signal during its import would end the rank"
    stop = StopFlag()
    stop.install()
    pathlib.Path(config.out).mkdir(parents=True, exist_ok=True)
    pathlib.Path(config.out, f"pid-{rank}").write_text(str(os.getpid()))
    print("hello from", rank, "of", os.environ.get("WORLD_SIZE"), "threads", os.environ.get("OMP_NUM_THREADS"),
          file=sys.stderr, flush=True)
    if mode == "data" and rank == 1:
        raise DataError("train.jsonl:3: not JSON. Fix the line.")
    if mode == "data":
        time.sleep(0.5)
        raise RuntimeError("Connection reset by peer")
    if mode == "bug" and rank == 1:
        raise ZeroDivisionError("division by zero")
    if mode == "kill" and rank == 1:
        time.sleep(0.3)
        print("last line", file=sys.stderr, flush=True)
        os.kill(os.getpid(), 9)
    if mode == "hang" and rank == 1:
        raise DataError("only rank 1 has seen it.")
    if mode == "all":
        raise DataError("the same on every rank.")
    if mode in ("wait", "ignore", "kill", "bug", "hang"):
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            if stop.requested and mode == "wait":
                time.sleep(0.5 + rank)
                pathlib.Path(config.out, f"saved-{rank}").touch()
                raise Preempted("stopped after step 3 of 9 as asked; the state is saved.")
            if stop.requested and mode not in ("ignore", "hang"):
                raise RuntimeError("Connection reset by peer")
            time.sleep(0.05)
    return types.SimpleNamespace(as_dict=lambda: {"loss": 1.5, "rank": rank}, next_commands=lambda config: [])

module = types.ModuleType("isthmus.recipes.run")
module.run_recipe = run
sys.modules["isthmus.recipes.run"] = module
"""


@pytest.fixture
def stubbed(tmp_path: Path) -> Path:
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "sitecustomize.py").write_text(STUB)
    (tmp_path / "out").mkdir()
    (tmp_path / "d").write_text('{"prompt": "a", "completion": "b"}\n')  # read before the ranks start
    return tmp_path


def command(*extra: str, nproc: int = 2) -> list[str]:
    args = ["sft", "--model", "m", "--data", "d", "--out", "out", "--nproc", str(nproc), *extra]
    return [sys.executable, "-m", "isthmus", *args]


def environment(folder: Path, mode: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")}
    return clean | {"STUB": mode, "PYTHONPATH": os.pathsep.join([str(folder / "stub"), str(SOURCE)])}


def run(folder: Path, mode: str, *more: str, nproc: int = 2) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*more, nproc=nproc),
        cwd=folder, env=environment(folder, mode), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def start_forked(isthmus: ForkServer, folder: Path, mode: str, *more: str) -> RunningRanks:
    """Start the command with two ranks, forked from the server."""
    variables = {name: value for name, value in environment(folder, mode).items() if name in ("STUB", "PYTHONPATH")}
    return isthmus.start(*command(*more)[3:], cwd=folder, **variables)


def run_forked(isthmus: ForkServer, folder: Path, mode: str, *more: str) -> CompletedCommand:
    return start_forked(isthmus, folder, mode, *more).result()


def wait_for_ranks(folder: Path, nproc: int, is_running: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while len(pids(folder)) < nproc:
        assert time.monotonic() < deadline and is_running()
        time.sleep(0.05)


def kill(*processes: int) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def running(isthmus: ForkServer, folder: Path, mode: str) -> Iterator[RunningRanks]:
    """Start the command with two ranks, and wait until both run."""
    process = start_forked(isthmus, folder, mode)
    try:
        wait_for_ranks(folder, 2, process.running)
        yield process
    finally:
        kill(*pids(folder))


@contextmanager
def running_alone(folder: Path, mode: str) -> Iterator[subprocess.Popen[str]]:
    """Start the command with one rank in a new interpreter, which imports no torch, and wait until it runs."""
    process = subprocess.Popen(
        command(nproc=1),
        cwd=folder, env=environment(folder, mode), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_for_ranks(folder, 1, lambda: process.poll() is None)
        yield process
    finally:
        kill(process.pid)
        process.wait()


def pids(folder: Path) -> list[int]:
    return [int(text) for path in (folder / "out").glob("pid-*") if (text := path.read_text())]


def messages(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("isthmus:")]


def test_result_is_printed_once_and_threads_are_divided(stubbed: Path) -> None:
    done = run(stubbed, "ok", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"loss": 1.5, "rank": 0}
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    line, *rest = done.stderr.splitlines()
    assert line.startswith("isthmus ") and "2 ranks" in line and rest == [f"hello from 0 of 2 threads {threads}"]


def test_error_of_one_rank_is_reported_once_with_its_code(isthmus: ForkServer, stubbed: Path) -> None:
    done = run_forked(isthmus, stubbed, "data")
    assert done.returncode == 65
    assert messages(done.stderr) == ["isthmus: train.jsonl:3: not JSON. Fix the line."]
    assert "Traceback" not in done.stderr and "elastic" not in done.stderr


def test_error_of_all_ranks_is_reported_once(isthmus: ForkServer, stubbed: Path) -> None:
    done = run_forked(isthmus, stubbed, "all")
    assert done.returncode == 65
    assert messages(done.stderr) == ["isthmus: the same on every rank."]


def test_bug_in_one_rank(isthmus: ForkServer, stubbed: Path) -> None:
    done = run_forked(isthmus, stubbed, "bug")
    assert done.returncode == 70
    assert messages(done.stderr) == [
        "isthmus: ZeroDivisionError: division by zero (unexpected; --debug shows the traceback)"
    ]
    debug = run_forked(isthmus, stubbed, "bug", "--debug")
    assert debug.returncode == 70 and debug.stderr.count('raise ZeroDivisionError("division by zero")') == 1


def test_killed_rank_is_named(isthmus: ForkServer, stubbed: Path) -> None:
    done = run_forked(isthmus, stubbed, "kill")
    assert done.returncode == 137
    (line,) = messages(done.stderr)
    assert "rank 1 was ended by SIGKILL" in line and "memory" in line and line.endswith("last line")


def test_hanging_rank_is_killed_after_another_rank_fails(isthmus: ForkServer, stubbed: Path) -> None:
    started_s = time.monotonic()
    done = run_forked(isthmus, stubbed, "hang")
    assert done.returncode == 65 and messages(done.stderr) == ["isthmus: only rank 1 has seen it."]
    assert time.monotonic() - started_s < 60 and not any(alive(pid) for pid in pids(stubbed))


def test_dollar_signs_in_arguments_are_kept(isthmus: ForkServer, stubbed: Path) -> None:
    name = "out-$x-${local_rank}-$$"
    (stubbed / name).mkdir()
    done = run_forked(isthmus, stubbed, "ok", "--out", name)
    assert done.returncode == 0, done.stderr
    assert len(list((stubbed / name).glob("pid-*"))) == 2


def test_ranks_without_out_share_the_next_folder(isthmus: ForkServer, stubbed: Path) -> None:
    (stubbed / "runs" / "sft-m-1").mkdir(parents=True)
    args = ["sft", "--model", "m", "--data", "d", "--nproc", "2"]
    variables = {name: environment(stubbed, "ok")[name] for name in ("STUB", "PYTHONPATH")}
    done = isthmus.start(*args, cwd=stubbed, **variables).result()
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (stubbed / "runs").iterdir()) == ["sft-m-1", "sft-m-2"]
    assert {path.name for path in (stubbed / "runs" / "sft-m-2").iterdir()} >= {"pid-0", "pid-1"}


def test_usage_error_starts_nothing(stubbed: Path) -> None:
    done = run(stubbed, "ok", "optim.lrr=1")
    assert done.returncode == 2 and "optim.lr?" in done.stderr
    assert not pids(stubbed)


@pytest.mark.thorough_cases("1", "2")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_saves_on_every_rank(isthmus: ForkServer, stubbed: Path, number: signal.Signals) -> None:
    with running(isthmus, stubbed, "wait") as process:
        process.send(0, number)
        process.send(0, number)  # like batch systems
        done = process.result()
    assert done.returncode == 75, done
    assert len(list((stubbed / "out").glob("saved-*"))) == 2
    assert messages(done.stderr)[-1] == "isthmus: stopped after step 3 of 9 as asked; the state is saved."
    assert len(messages(done.stderr)) == 2 and not done.stdout


def test_second_ctrl_c_kills(isthmus: ForkServer, stubbed: Path) -> None:
    with running(isthmus, stubbed, "ignore") as process:
        process.send(0, signal.SIGINT)
        time.sleep(0.8)
        process.send(0, signal.SIGINT)
        done = process.result()
        assert done.returncode == 130 and "killed" in messages(done.stderr)[-1]
        assert not any(alive(pid) for pid in pids(stubbed))


def test_signal_before_the_ranks_are_up(stubbed: Path) -> None:
    process = subprocess.Popen(
        command(), cwd=stubbed, env=environment(stubbed, "wait"), stderr=subprocess.PIPE, text=True
    )
    while not catches(process.pid, signal.SIGTERM):  # until then, the interpreter starts
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    assert "Traceback" not in err


def test_no_rank_outlives_the_command(isthmus: ForkServer, stubbed: Path) -> None:
    with running(isthmus, stubbed, "wait") as process:
        process.send(0, signal.SIGKILL)
        process.result()
        deadline = time.monotonic() + 60
        while any(alive(pid) for pid in pids(stubbed)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert len(list((stubbed / "out").glob("saved-*"))) == 2


def test_single_process_sigterm_and_error(stubbed: Path) -> None:
    with running_alone(stubbed, "wait") as process:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 75
    assert messages(err) == [
        "isthmus: SIGTERM: saving after this step.",
        "isthmus: stopped after step 3 of 9 as asked; the state is saved.",
    ]
    assert run(stubbed, "all", nproc=1).returncode == 65


def test_single_process_second_ctrl_c(stubbed: Path) -> None:
    with running_alone(stubbed, "ignore") as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.8)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in err


@pytest.mark.thorough
def test_under_another_launcher_one_rank_reports(stubbed: Path) -> None:
    """Like torchrun or srun: the parent sets the rank variables, and every rank prints to the terminal."""
    base = environment(stubbed, "all") | {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    ranks = [
        subprocess.Popen(command()[:-2], cwd=stubbed, env=base | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [65, 65]
    assert len([line for text in errors for line in messages(text)]) == 1


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
