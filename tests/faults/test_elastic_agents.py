"""Agents of torchrun as machines: one is killed, the run continues on the other, and grows when a machine joins."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from faults.command import environment, rows
from faults.fork_server import ForkServer
from faults.hosts import rank_variables

pytestmark = pytest.mark.thorough
STEPS = "train.steps=120"


@contextmanager
def machine(args: list[str], folder: Path, name: str, port: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """An agent of torchrun with two ranks; yields it and what it prints."""
    (memory := folder / f"memory-{name}").mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3"]
    command += ["--rdzv-id=elastic", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    command += ["--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"]
    command += ["-m", "isthmus", *args, STEPS, "parallel.elastic=true", f"checkpoint.memory_dir={memory}"]
    command += ["checkpoint.memory_every=1"]
    output = folder / f"agent-{name}.log"
    with output.open("wb") as file:
        variables = environment() | {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        agent = subprocess.Popen(command, cwd=folder, env=variables, stdout=file, stderr=file)
    try:
        yield agent, output
    finally:
        kill(agent)


def kill(agent: subprocess.Popen[bytes]) -> None:
    """The agent and its ranks, which have sessions of their own."""
    if agent.poll() is None:
        for process in [*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)]:
            process.kill()
        agent.wait()


def wait_for_line(output: Path, pattern: str) -> None:
    deadline = time.monotonic() + 240
    while not re.search(pattern, text := output.read_text()):
        assert time.monotonic() < deadline, text
        time.sleep(0.2)


def test_agents(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    out, port = tmp_path / "out", rank_variables(1)[0]["MASTER_PORT"]
    with ExitStack() as stack:
        first, output = stack.enter_context(machine(sft_args, tmp_path, "a", port))
        time.sleep(2)  # the first agent serves the store of all
        second, _ = stack.enter_context(machine(sft_args, tmp_path, "b", port))
        wait_for_line(output, r"elastic: 4 of 4 ranks(?s:.*)step +[3-9]/120")
        kill(second)
        wait_for_line(
            output, r"elastic: 2 of 2 ranks(?s:.*)resuming from the copy of step \d+ in memory(?s:.*)step +\d"
        )
        third, _ = stack.enter_context(machine(sft_args, tmp_path, "c", port))
        assert first.wait(300) == 0, output.read_text()
        assert third.wait(60) == 0
    text = output.read_text()
    starts = re.findall(r"elastic: (\d) of \d ranks", text)
    assert starts[-3:] == ["4", "2", "4"], text  # the first agent may begin alone
    assert re.search(r"resumed from \S*/checkpoints/iter_", text), text  # that of the stop, before the machine joined

    alone = tmp_path / "alone"
    completed = isthmus(*sft_args, "--out", str(alone), STEPS)
    assert completed.returncode == 0, completed
    losses = {row["step"]: (row["loss"], row["grad_norm"]) for row in rows(out) if "loss" in row}
    expected = {row["step"]: (row["loss"], row["grad_norm"]) for row in rows(alone) if "loss" in row}
    assert losses.keys() == expected.keys()
    for step, values in expected.items():
        assert losses[step] == pytest.approx(values, rel=1e-5), step
