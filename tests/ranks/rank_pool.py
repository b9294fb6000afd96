"""A pool of ranks that runs tasks one after another, each with its own parallel layout.

Imports take seconds and a task often less than one, so tests share the processes, which are forked from a server with
all modules imported. A task that fails or times out ends the pool's processes; the next task starts new ones.
"""

from __future__ import annotations

import functools
import json
import os
import selectors
import signal
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ranks.pool_worker import PLATFORM
from shared_server import SharedServer

WORKER = Path(__file__).with_name("pool_worker.py")
RESTART_AFTER_TASKS = 10
"""Tasks per set of processes: each layout leaves the threads of its process groups behind."""
AFTER_FAILURE_S = 5.0
"""Time for the other ranks after one has failed; they often hang in a collective."""


START_S = 120.0
"""Time for all ranks to connect, including the imports of the server."""


class RankFailure(AssertionError):
    """A task failed on a rank."""


class RankPool:
    """``size`` processes on this machine with a process group of ``platform``: gloo on a CPU, NCCL on GPUs."""

    def __init__(self, size: int, folder: Path, platform: str = "cpu") -> None:
        self.size = size
        self.folder = folder
        self._platform = platform
        self._starts = 0
        self._tasks_done = 0
        self._ranks: list[socket.socket] = []
        self._pids: list[int] = []

    def run(self, task: str, /, *, timeout_s: float = 180.0, **settings: Any) -> Any:
        """Run ``<task>(**settings)`` on every rank and return what rank 0 returned.

        Args:
            task: a function below ``tests/``, such as ``ranks.tasks.train``; its result must be JSON.
            timeout_s: for all ranks, including their start.
            settings: for the task.

        Raises:
            RankFailure: with the traceback, or the end of the log of a rank without a reply.
        """
        if self._tasks_done >= RESTART_AFTER_TASKS:
            self.close()
        if not self._ranks:
            self._start()
        self._tasks_done += 1
        request = json.dumps({"task": task, "settings": settings}, default=str).encode() + b"\n"
        try:
            for rank in self._ranks:
                rank.sendall(request)
        except BrokenPipeError:
            self._fail(task, {}, "has ended")
        return self._replies(task, time.monotonic() + timeout_s)

    def close(self) -> None:
        """End the processes; a later task starts new ones."""
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for rank in self._ranks:
            rank.close()
        self._ranks, self._pids = [], []
        self._tasks_done = 0

    def _start(self) -> None:
        self._starts += 1
        # A rendezvous file of an earlier pool has addresses that are no longer valid.
        rendezvous_file = Path(tempfile.mkdtemp(dir=self.folder)) / "rendezvous"
        # The path of a socket has at most 107 bytes; paths of pytest may be longer.
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/socket")
            listener.listen()
            listener.settimeout(START_S)
            for rank in range(self.size):
                variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size}
                environment = {name: str(value) for name, value in variables.items()} | {PLATFORM: self._platform}
                log = str(self._log(rank))
                self._pids.append(
                    fork_rank(
                        environment=environment,
                        log=log,
                        socket=f"{folder}/socket",
                        rendezvous_file=str(rendezvous_file),
                    )
                )
            sockets = {}
            for _ in range(self.size):
                rank_socket, _ = listener.accept()
                sockets[int(rank_socket.recv(16))] = rank_socket
        self._ranks = [sockets[rank] for rank in range(self.size)]

    def _log(self, rank: int) -> Path:
        return self.folder / f"world-{self.size}-{self._starts}-rank-{rank}.log"

    def _replies(self, task: str, deadline: float) -> Any:
        buffers = [b""] * self.size
        replies: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self._ranks):
                selector.register(rank, selectors.EVENT_READ, number)
            while len(replies) < self.size:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    self._fail(task, replies, "did not answer in time")
                for key, _ in ready:
                    with suppress(ConnectionResetError):
                        data = b""
                        data = self._ranks[key.data].recv(1 << 16)
                    buffers[key.data] += data
                    if not data:
                        self._fail(task, replies, "ended")
                    if buffers[key.data].endswith(b"\n"):
                        replies[key.data] = json.loads(buffers[key.data])
                        selector.unregister(key.fileobj)
                        if "error" in replies[key.data]:
                            deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
        if any("error" in reply for reply in replies.values()):
            self._fail(task, replies, "")
        return replies[0]["result"]

    def _fail(self, task: str, replies: dict[int, dict[str, Any]], reason: str) -> None:
        self.close()
        failures = [f"rank {rank}: {reply['error']}" for rank, reply in sorted(replies.items()) if "error" in reply]
        if not failures:
            missing = [rank for rank in range(self.size) if rank not in replies]
            failures = [f"rank {rank} {reason}:\n{self._log(rank).read_text()[-3000:]}" for rank in missing]
        raise RankFailure(f"{task} on {self.size} ranks\n" + "\n".join(failures))


@functools.cache
def _server() -> SharedServer:
    """The process that the ranks of this pytest process are forked from."""
    return SharedServer(WORKER, {"GLOO_SOCKET_IFNAME": "lo"} | os.environ | {"OMP_NUM_THREADS": "1"})


def fork_rank(**request: Any) -> int:
    """Fork a rank, see :func:`ranks.pool_worker.run_rank`; returns its pid."""
    server = _server()
    server.send(request)
    return int(server.receive())
