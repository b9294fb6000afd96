"""What ranks of several machines know of each other while they train: who lives, where they are, who has failed.

Each rank says about every second what it is doing, in the store that the ranks met in, and listens to the next one.
One that falls silent for as long as a collective may wait, or says that it has failed, ends the others with its name;
so does a store that is gone, since its process is. Nothing here is a collective: it works while those hang.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from isthmus.engine.parallel.process_groups import world_from_environment
from isthmus.engine.parallel.rendezvous import master
from isthmus.engine.trace_region import current_region, trace_region
from isthmus.errors import Hang, IsthmusError, Preempted
from isthmus.launch.first_failure import RankReport, reports_folder
from isthmus.launch.speaker import speaks_first

GRACE_S = 3.0
"""For this rank's own error to be told, where it meets one of its own."""
_BEAT_S = 1.0
_LEAVING = "leaving, since another rank did not answer"
_ECHO = re.compile(r"\bgloo\b|connection (closed|reset|refused)|timed out|timeout|broken pipe", re.I)


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank last said."""

    rank: int
    host: str
    count: int
    doing: str


class Pulse:
    """This rank's pulse, beating while it is entered; does nothing for a rank that is alone."""

    def __init__(self, timeout_s: float) -> None:
        """Set up.

        Args:
            timeout_s: silence after which a rank counts as lost.
        """
        self._timeout_s = timeout_s
        self._rank, self._world_size, _ = world_from_environment()
        self._store: dist.Store | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._heard: dict[int, tuple[int, float]] = {}

    def __enter__(self) -> Pulse:
        if self._world_size > 1:
            address, port = master()
            # Of its own: a client that waits for a key is closed to everybody else meanwhile.
            try:
                self._store = dist.TCPStore(
                    address, port, self._world_size, is_master=False, wait_for_workers=False,
                    timeout=timedelta(seconds=min(30.0, self._timeout_s)),
                )  # fmt: skip
                self._say(0)
            except dist.DistError as error:
                raise self._store_lost() from error
            threading.Thread(target=self._run, name="pulse", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._ended.set()
        # Started by --nproc, a rank tells of its end in a file, and once.
        if self._store is None or error is None or reports_folder() is not None:
            return
        code = error.exit_code if isinstance(error, IsthmusError) else IsthmusError.exit_code
        told = str(error) if isinstance(error, IsthmusError) else f"{type(error).__name__}: {error}"
        if isinstance(error, Exception) and code not in (Preempted.exit_code, Hang.exit_code):
            self._post(code, f"rank {self._rank} on {socket.gethostname()} has failed: {told}")
        if self._rank == 0 and code != Preempted.exit_code:
            time.sleep(2 * _BEAT_S)  # this process may hold the store, and the others are to read it

    def explain(self, error: RuntimeError) -> IsthmusError | None:
        """The end of a peer that ``error`` is the echo of; None if it is none."""
        if self._store is None or not (isinstance(error, dist.DistError) or _ECHO.search(str(error))):
            return None
        with trace_region(_LEAVING):
            try:
                before = self._beats()
                for _ in range(3):
                    time.sleep(_BEAT_S)
                    if (end := self._peers_end()) is not None:
                        return end
                after = self._beats()
            except (dist.DistError, RuntimeError):
                return self._store_lost()
        silent = [one for one in after if one in before and one.rank != self._rank and _LEAVING not in one.doing]
        if silent:
            return self._lost(silent)
        where = "; ".join(f"rank {one.rank} on {one.host}: {one.doing or 'between steps'}" for one in after)
        return Hang(
            f"rank {self._rank} waited in vain for another rank (parallel.timeout_s={self._timeout_s:g}): "
            f"{_first_line(error)}. Where they were: {where}. See which of them hangs and why, or raise "
            "parallel.timeout_s."
        )

    def _run(self) -> None:
        count = 0
        while not self._ended.wait(_BEAT_S):
            count += 1
            try:
                self._say(count)
                end = self._peers_end() or self._silent_neighbour()
            except (dist.DistError, RuntimeError):
                end = self._store_lost()
            if end is not None:
                self._post(end.exit_code, str(end))
                # Time for a word of this rank's own, and for an end that only looks like a loss: all may be done.
                if not self._ended.wait(GRACE_S):
                    self._leave(end)
                return

    def _say(self, count: int) -> None:
        with self._lock:
            assert self._store is not None
            self._store.set(f"pulse/{self._rank}", json.dumps([socket.gethostname(), count, current_region()]))

    def _post(self, code: int, told: str) -> None:
        """Tell all ranks why this run ends; the first one counts."""
        with self._lock, suppress(dist.DistError, RuntimeError):
            assert self._store is not None
            self._store.compare_set("pulse/end", "", json.dumps([code, told]))

    def _beat(self, rank: int) -> Beat | None:
        with self._lock:
            assert self._store is not None
            key = f"pulse/{rank}"
            return Beat(rank, *json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _beats(self) -> list[Beat]:
        return [beat for rank in range(self._world_size) if (beat := self._beat(rank)) is not None]

    def _peers_end(self) -> IsthmusError | None:
        with self._lock:
            assert self._store is not None
            if not self._store.check(["pulse/end"]):
                return None
            code, told = json.loads(self._store.get("pulse/end"))
        end = IsthmusError(told)
        end.exit_code = code
        return end

    def _silent_neighbour(self) -> IsthmusError | None:
        beat = self._beat((self._rank + 1) % self._world_size)
        if beat is None:
            return None
        now_s = time.monotonic()
        count, since_s = self._heard.get(beat.rank, (-1, now_s))
        if beat.count != count:
            self._heard[beat.rank] = (beat.count, now_s)
            return None
        return self._lost([beat]) if now_s - since_s > self._timeout_s else None

    def _lost(self, beats: list[Beat]) -> Hang:
        who = "; ".join(f"rank {one.rank} on {one.host}, last in {one.doing or 'between steps'}" for one in beats)
        return Hang(
            f"no sign of life any more of {who}. Its process was killed or stopped, or its machine is gone: see its "
            "log and its machine; the same command goes on from the last checkpoint."
        )

    def _store_lost(self) -> Hang:
        address, port = master()
        return Hang(
            f"rank 0, or the launcher beside it, is gone: nobody answers at {address}:{port} any more. See its log "
            "and its machine; the same command goes on from the last checkpoint."
        )

    def _leave(self, end: IsthmusError) -> None:
        """End this process; its main thread may wait in a collective for ever."""
        folder = reports_folder()
        if folder is not None:
            RankReport(rank=self._rank, exit_code=end.exit_code, message=str(end)).write(folder)
        elif speaks_first():
            with suppress(OSError):
                print(f"isthmus: rank {self._rank}: {end}", file=sys.stderr, flush=True)
        os._exit(end.exit_code)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
