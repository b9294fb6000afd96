"""A world of ranks that stays up: started once, it runs one task after another, each under its own layout.

Starting a process costs seconds of imports and a task often less than one, so tests share the processes, and these are
forked from one that has imported everything. A task that fails on a rank, or takes too long, ends the world; the next
task starts a new one.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

MEMBER = Path(__file__).with_name("pool_worker.py")
FRESH_AFTER_TASKS = 3
"""Tasks that one set of processes runs: each set of process groups leaves gloo threads behind, and they poll."""
STRAGGLER_S = 5.0
"""How long the other ranks may take once one has failed; they often hang in a collective that it never joined."""


START_S = 120.0
"""Until a rank that was forked is there: the first has to wait for all imports."""


class RankFailure(AssertionError):
    """A task did not end well on some rank."""


class RankPool:
    """``size`` processes on this machine, joined over gloo by a file."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self.folder = folder
        self._starts = 0
        self._tasks_done = 0
        self._ranks: list[socket.socket] = []
        self._pids: list[int] = []

    def run(self, task: str, /, *, timeout_s: float = 180.0, **settings: Any) -> Any:
        """Run ``<task>(**settings)`` on every rank and return what rank 0 returned.

        Args:
            task: a function below ``tests/``, such as ``ranks.tasks.train``; it returns something that JSON can hold.
            timeout_s: for all ranks together, the start included.
            settings: for the task.

        Raises:
            RankFailure: with the traceback, or the end of the log of a rank that fell silent.
        """
        if self._tasks_done >= FRESH_AFTER_TASKS:
            self.close()
        if not self._ranks:
            self._start()
        self._tasks_done += 1
        request = json.dumps({"task": task, "settings": settings}, default=str).encode() + b"\n"
        try:
            for rank in self._ranks:
                rank.sendall(request)
        except BrokenPipeError:
            self._give_up(task, {}, "is gone")
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
        # A file of an earlier meeting would send the ranks to ports that nobody listens on any more.
        meeting = Path(tempfile.mkdtemp(dir=self.folder)) / "meeting"
        # The path of a socket has at most 107 bytes, and those of pytest may be longer.
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as door:
            door.bind(f"{folder}/door")
            door.listen()
            door.settimeout(START_S)
            for rank in range(self.size):
                of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size}
                environment = {name: str(value) for name, value in of_rank.items()}
                log = str(self._log(rank))
                self._pids.append(
                    fork_rank(environment=environment, log=log, socket=f"{folder}/door", meeting=str(meeting))
                )
            came = {}
            for _ in range(self.size):
                rank_socket, _ = door.accept()
                came[int(rank_socket.recv(16))] = rank_socket
        self._ranks = [came[rank] for rank in range(self.size)]

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
                    self._give_up(task, replies, "did not answer in time")
                for key, _ in ready:
                    with suppress(ConnectionResetError):
                        data = b""
                        data = self._ranks[key.data].recv(1 << 16)
                    buffers[key.data] += data
                    if not data:
                        self._give_up(task, replies, "ended")
                    if buffers[key.data].endswith(b"\n"):
                        replies[key.data] = json.loads(buffers[key.data])
                        selector.unregister(key.fileobj)
                        if "error" in replies[key.data]:
                            deadline = min(deadline, time.monotonic() + STRAGGLER_S)
        if any("error" in reply for reply in replies.values()):
            self._give_up(task, replies, "")
        return replies[0]["result"]

    def _give_up(self, task: str, replies: dict[int, dict[str, Any]], fate: str) -> None:
        self.close()
        failures = [f"rank {rank}: {reply['error']}" for rank, reply in sorted(replies.items()) if "error" in reply]
        if not failures:
            silent = [rank for rank in range(self.size) if rank not in replies]
            failures = [f"rank {rank} {fate}:\n{self._log(rank).read_text()[-3000:]}" for rank in silent]
        raise RankFailure(f"{task} on {self.size} ranks\n" + "\n".join(failures))


@functools.cache
def _stem() -> subprocess.Popen[str]:
    """The process that ranks are forked from, of this process of pytest."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    stem = subprocess.Popen(
        [sys.executable, str(MEMBER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    atexit.register(stem.kill)
    return stem


def fork_rank(**request: Any) -> int:
    """Fork a process that becomes a rank as ``request`` has it, see :func:`ranks.pool_worker.be_rank`; its number."""
    stem = _stem()
    assert stem.stdin is not None and stem.stdout is not None
    stem.stdin.write(json.dumps(request) + "\n")
    stem.stdin.flush()
    return int(stem.stdout.readline())
