"""A Ray cluster of two nodes on this machine, which only processes with its token can use."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from faults.command import environment

_STARTS = 5


@contextmanager
def ray_cluster(folder: Path, *, cpus: int, **extra: str) -> Iterator[dict[str, str]]:
    """Start a cluster whose nodes have ``cpus`` and the variables ``extra``; yields the variables of its clients.

    Raises:
        FileNotFoundError: Ray is not installed.
    """
    program = shutil.which("ray")
    if program is None:
        raise FileNotFoundError("pip install 'isthmus[ray]'")
    base = int.from_bytes(secrets.token_bytes(1), "big") * 20
    gcs, dashboard, client = 21000 + base, 21001 + base, 21002 + base
    variables = (
        environment()
        | extra
        | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
        }
    )
    common = [f"--num-cpus={cpus}", "--object-store-memory=80000000", "--node-ip-address=127.0.0.1", "--block"]
    head = ["--head", f"--port={gcs}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"]
    head += [f"--temp-dir={folder}", "--min-worker-port=0", "--max-worker-port=0"]
    starts: list[subprocess.Popen[bytes]] = []
    log = folder / "cluster.log"
    try:
        with open(log, "w") as output:
            for nodes, options in enumerate((head, [f"--address=127.0.0.1:{gcs}"]), start=1):
                words = [sys.executable, program, "start", *options, *common]
                while log.read_text(errors="replace").count("Ray runtime started") < nodes:
                    # On a busy machine, Ray gives up after 30 s.
                    if not starts or starts[-1].poll() is not None or len(starts) < nodes:
                        assert len(starts) < _STARTS, log.read_text(errors="replace")[-2000:]
                        starts.append(
                            subprocess.Popen(words, env=variables, stdout=output, stderr=output, start_new_session=True)
                        )
                    time.sleep(0.2)
        _wait_for_port(dashboard)  # it listens some seconds after the nodes
        yield {name: value for name, value in variables.items() if name.startswith("RAY_")}
    finally:
        # Daemons of Ray are in sessions of their own; the folder of the cluster is in their commands.
        parents = [process for start in starts for process in _processes(start.pid)]
        for process in {*parents, *_with_folder(folder)}:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


def _wait_for_port(port: int, timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        assert time.monotonic() < end, f"nothing listens on port {port} after {timeout_s:.0f} s"
        time.sleep(0.2)


def _processes(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def _with_folder(folder: Path) -> list[psutil.Process]:
    result: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in word for word in process.info["cmdline"] or ()) and process.pid != os.getpid():
            result += _processes(process.pid)
    return result
