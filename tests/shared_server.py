"""Servers that have imported what a kind of test needs: the workers of pytest share them, each works with a fork.

Imports take seconds, a fork takes milliseconds. A script of a server calls :func:`serve` after its imports; the first
client starts it. A server ends with the pytest process that owns :data:`FOLDER`.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "ISTHMUS_TEST_SERVERS"
"""Environment variable with the folder of the sockets; its name ends with the pid of its owner."""


def server_folder() -> Path:
    """The folder of the sockets: that of the process which started this one, or else a new one."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="isthmus-servers-", suffix=f"-{os.getpid()}")
        atexit.register(shutil.rmtree, os.environ[FOLDER], ignore_errors=True)
    return Path(os.environ[FOLDER])


class SharedServer:
    """Connection to a fork of the server of ``script``: requests and replies are lines of JSON."""

    def __init__(
        self, script: Path, environment: Mapping[str, str], *, cwd: Path | None = None, log: Path | None = None
    ) -> None:
        """The fork has this environment, and ``log`` as its stderr instead of the log of the server."""
        folder = server_folder()
        environment = {**environment, FOLDER: str(folder)}
        address = folder / f"{script.parent.name}-{script.stem}"
        log_of_server = address.with_suffix(".log")
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not address.exists():
                _start(script, str(address), environment, log_of_server)
        self.log = log or log_of_server
        self._socket = socket.socket(socket.AF_UNIX)
        self._replies = self._socket.makefile("rb", buffering=0)  # select() does not see a line that is in a buffer
        try:
            self._socket.connect(str(address))
            self.send({"environment": dict(environment), "cwd": str(cwd or Path.cwd()), "log": log and str(log)})
        except OSError as error:
            raise EOFError(f"the server has ended:\n{log_of_server.read_text()[-3000:]}") from error

    def send(self, request: Any) -> None:
        self._socket.sendall(json.dumps(request, default=str).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next reply. Raises ``TimeoutError``, or ``EOFError`` with the end of the log if the fork has ended."""
        if not select.select([self._socket], [], [], timeout_s)[0]:
            raise TimeoutError
        if not (line := self._replies.readline()):
            raise EOFError(f"the server has ended:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def close(self) -> None:
        """End the fork."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._replies.close()
        self._socket.close()


def _start(script: Path, address: str, environment: Mapping[str, str], log: Path) -> None:
    # Clients can connect before the server has finished its imports.
    with socket.socket(socket.AF_UNIX) as listener, log.open("w") as stderr:
        listener.bind(address)
        listener.listen(64)
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(listener.fileno())],
            env=environment, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr,
        )  # fmt: skip


def serve() -> None:
    """Fork for each client. Returns in the fork: its stdin and stdout are the connection to the client."""
    owner = os.pidfd_open(int(os.environ[FOLDER].rpartition("-")[2]))
    listener = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    while True:
        if owner in select.select([listener, owner], [], [])[0]:
            os._exit(0)
        connection, _ = listener.accept()
        if not os.fork():
            break
        connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listener.close()
    os.close(owner)
    for number in (0, 1):
        os.dup2(connection.fileno(), number)
    connection.close()
    client = json.loads(sys.stdin.readline())
    os.environ.clear()
    os.environ.update(client["environment"])
    os.chdir(client["cwd"])
    if client["log"]:
        log = os.open(client["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 2)
        os.close(log)
    remote_code: Any = sys.modules.get("transformers.dynamic_module_utils")
    if remote_code is not None and "HF_MODULES_CACHE" in os.environ:
        remote_code.HF_MODULES_CACHE = os.environ["HF_MODULES_CACHE"]
