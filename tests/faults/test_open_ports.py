"""What a run on one machine opens to other users and other machines."""

from __future__ import annotations

import base64
import multiprocessing
import os
import pickle
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from faults.command import environment, wait_for_step
from faults.fork_server import ForkServer, RunningRanks
from faults.hosts import rank_variables


# Torch elastic unpickles its state, in base64, from a key of a store that it serves. A port that does not answer
# as a store does keeps the client waiting.
class Pickled:
    """Its pickle creates a file."""

    def __init__(self, intruder: Path) -> None:
        self.intruder = intruder

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.intruder), "w"))


def attack_port(intruder: Path, run_id: str, port: int, answered: Connection) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store.set(f"torch.rendezvous.{run_id}", base64.b64encode(pickle.dumps(Pickled(intruder))))
    answered.send(port)


def attack(intruder: Path, run_id: str, ports: Iterable[int], limit_s: float = 3.0) -> list[int]:
    """Write a pickle that creates ``intruder`` into the stores at ``ports``; returns the ports that answered."""
    context = multiprocessing.get_context("fork")  # a new interpreter imports torch for seconds
    answers, answered = context.Pipe(duplex=False)
    attackers = [context.Process(target=attack_port, args=(intruder, run_id, port, answered)) for port in ports]
    for attacker in attackers:
        attacker.start()
    until = time.monotonic() + limit_s
    for attacker in attackers:
        attacker.join(max(0, until - time.monotonic()))
        attacker.kill()
        attacker.join()
    answered.close()
    with answers, suppress(EOFError):
        results = []
        while True:
            results.append(answers.recv())
    return results


@pytest.fixture
def run(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> Iterator[RunningRanks]:
    """A run of two ranks that has trained a step."""
    command = isthmus.start(*sft_args, "--nproc", "2", "train.steps=100000", cwd=tmp_path, TMPDIR=str(tmp_path))
    try:
        wait_for_step(tmp_path / "out", 1)
        yield command
    finally:
        command.send(0, signal.SIGTERM)
        ended = command.result()
        assert ended.returncode == 75, ended


def listening(launcher: psutil.Process) -> list[tuple[str, int]]:
    processes = [launcher, *launcher.children(recursive=True)]
    connections = [connection for member in processes for connection in member.net_connections("inet")]
    return [(item.laddr.ip, item.laddr.port) for item in connections if item.status == psutil.CONN_LISTEN]


def test_run_listens_on_loopback_only_and_meets_at_a_private_file(run: RunningRanks, tmp_path: Path) -> None:
    launcher = psutil.Process(run.pids[0])
    rank = launcher.children()[0].environ()
    sockets = listening(launcher)
    assert {address for address, _ in sockets} <= {"127.0.0.1"}, sockets
    intruder = tmp_path / "intruder"
    ports = {int(rank["MASTER_PORT"]), *(port for _, port in sockets)}
    assert attack(intruder, rank["TORCHELASTIC_RUN_ID"], ports) == [] and not intruder.exists()
    assert run.running()
    (store,) = tmp_path.glob("isthmus-ranks-*/store")
    assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700 and store.parent.stat().st_uid == os.getuid()
    assert store.stat().st_size > 0


def test_attack_runs_code_in_the_rendezvous_of_torch_elastic(tmp_path: Path) -> None:
    """The attack of the other test succeeds where it can: a run with torch's own rendezvous would fail that test."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    store = TCPStore("127.0.0.1", port, **options)
    backend = C10dRendezvousBackend(store, "control")
    handler = DynamicRendezvousHandler.from_backend("control", store, backend, 1, 1)
    handler.next_rendezvous()
    intruder = tmp_path / "intruder"
    assert attack(intruder, "control", [port], limit_s=60.0) == [port]
    for _ in range(20):  # the handler keeps a state for a second, and writes its own every five
        with suppress(AttributeError):  # a file, in place of the state
            handler.num_nodes_waiting()
        if intruder.exists():
            return
        time.sleep(0.5)
        attack(intruder, "control", [port])
    pytest.fail("no code was run: the attack of the other test proves nothing")


JOIN = """
import psutil
from isthmus.cli.process import exit_status_of
from isthmus.launch.rendezvous import join_ranks
from isthmus.platforms.cpu import CpuPlatform

def join():
    with join_ranks(CpuPlatform("test"), join_timeout_s=100, timeout_s=100):
        sockets = psutil.Process().net_connections("inet")
        print("joined", {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}, flush=True)

status = exit_status_of(join)
print(status.message)
raise SystemExit(status.exit_code)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("other", ["a" * 16, "b" * 16], ids=["same token", "another token"])
def test_ranks_of_two_machines_check_the_token(other: str) -> None:
    ranks = []
    for variables, token in zip(rank_variables(2), ("a" * 16, other), strict=True):
        variables = environment() | variables | {"LOCAL_WORLD_SIZE": "1", "ISTHMUS_RUN_TOKEN": token}
        command = [sys.executable, "-c", JOIN]
        ranks.append(
            subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    if other == "a" * 16:
        assert [rank.returncode for rank in ranks] == [0, 0], outputs
        assert all(output.startswith("joined {'127.0.0.1'}") for output, _ in outputs), outputs
    else:
        assert [rank.returncode for rank in ranks] == [77, 77], outputs
        assert "of a process with another token, or none" in outputs[0][0] and "joined" not in outputs[1][0], outputs
