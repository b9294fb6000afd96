"""A world of ranks that stays up: started once, it runs one task after another, each under its own layout.

Starting a process costs seconds of imports and a task often less than one, so tests share the processes. A task that
fails on a rank, or takes too long, ends the world; the next task starts a new one.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MEMBER = Path(__file__).with_name("member.py")
FRESH_AFTER_TASKS = 6
"""Tasks that one set of processes runs: gloo leaves threads behind with every set of groups, and they cost time."""
STRAGGLER_S = 5.0
"""How long the other ranks may take once one has failed; they often hang in a collective that it never joined."""


class RankFailure(AssertionError):
    """A task did not end well on some rank."""


class World:
    """``size`` processes on this machine, joined over gloo by a file."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self.folder = folder
        self._starts = 0
        self._tasks_done = 0
        self._ranks: list[subprocess.Popen[bytes]] = []

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
                assert rank.stdin is not None
                rank.stdin.write(request)
                rank.stdin.flush()
        except BrokenPipeError:
            self._give_up(task, {}, "is gone")
        return self._replies(task, time.monotonic() + timeout_s)

    def close(self) -> None:
        """End the processes; a later task starts new ones."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()
            for pipe in (rank.stdin, rank.stdout):
                if pipe is not None:
                    pipe.close()
        self._ranks = []
        self._tasks_done = 0

    def _start(self) -> None:
        self._starts += 1
        # A file of an earlier meeting would send the ranks to ports that nobody listens on any more.
        meeting = Path(tempfile.mkdtemp(dir=self.folder)) / "meeting"
        for rank in range(self.size):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_WORLD_SIZE": str(self.size),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            }
            with self._log(rank).open("wb") as log:
                self._ranks.append(
                    subprocess.Popen(
                        [sys.executable, str(MEMBER), f"file://{meeting}"],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        env=environment,
                        bufsize=0,
                    )
                )

    def _log(self, rank: int) -> Path:
        return self.folder / f"world-{self.size}-{self._starts}-rank-{rank}.log"

    def _replies(self, task: str, deadline: float) -> Any:
        buffers = [b""] * self.size
        replies: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self._ranks):
                assert rank.stdout is not None
                selector.register(rank.stdout, selectors.EVENT_READ, number)
            while len(replies) < self.size:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    self._give_up(task, replies, "did not answer in time")
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
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
