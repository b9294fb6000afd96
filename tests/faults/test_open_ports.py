"""What a run on one machine opens to other users and other machines."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from faults.command import environment, wait_for_step

# Torch elastic loads its state with pickle from a key of a store that it serves. A port that does not answer as a store
# does keeps the client waiting.
ATTACK = """
import os, sys, threading, time
from torch.distributed import TCPStore

class Pickled:
    def __reduce__(self):
        return (open, (sys.argv[1], "w"))

def attack(port):
    import pickle
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store.set("torch.rendezvous." + sys.argv[2], pickle.dumps(Pickled()))
    print("a store answers at port", port, flush=True)

for port in sys.argv[3:]:
    threading.Thread(target=attack, args=(int(port),), daemon=True).start()
time.sleep(6)
os._exit(0)
"""


@pytest.fixture
def run(sft_args: list[str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run of two ranks that has trained a step."""
    command = [sys.executable, "-m", "isthmus", *sft_args, "--nproc", "2", "train.steps=100000"]
    with (tmp_path / "output").open("wb") as output:
        variables = environment() | {"TMPDIR": str(tmp_path)}
        process = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=output, stderr=output)
        try:
            wait_for_step(tmp_path / "out", 1)
            yield process
        finally:
            process.terminate()
            assert process.wait(60) == 75, (tmp_path / "output").read_text()[-2000:]


def listening(process: subprocess.Popen[bytes]) -> list[tuple[str, int]]:
    launcher = psutil.Process(process.pid)
    processes = [launcher, *launcher.children(recursive=True)]
    sockets = [socket for process_ in processes for socket in process_.net_connections("inet")]
    return [(socket.laddr.ip, socket.laddr.port) for socket in sockets if socket.status == psutil.CONN_LISTEN]


def test_run_listens_on_loopback_only_and_serves_no_store(run: subprocess.Popen[bytes], tmp_path: Path) -> None:
    rank = psutil.Process(run.pid).children()[0].environ()
    sockets = listening(run)
    assert {address for address, _ in sockets} <= {"127.0.0.1"}, sockets
    intruder = tmp_path / "intruder"
    ports = {rank["MASTER_PORT"], *(str(port) for _, port in sockets)}
    command = [sys.executable, "-c", ATTACK, str(intruder), rank["TORCHELASTIC_RUN_ID"], *ports]
    attack = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert attack.returncode == 0 and not attack.stdout and not intruder.exists(), attack
    assert run.poll() is None


def test_rendezvous_of_a_run_is_a_file_that_no_other_user_can_open(
    run: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (store,) = tmp_path.glob("isthmus-ranks-*/store")
    assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700 and store.parent.stat().st_uid == os.getuid()
    assert store.stat().st_size > 0
