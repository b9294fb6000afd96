"""The heartbeat of the ranks, which detects ranks that failed or hang.

Each rank writes a heartbeat to the rendezvous store about once a second and reads that of the next rank. If it stops
for ``LOST_S``, if any rank posts a failure, or if the store does not answer, the rank exits with a message that names
the cause. The heartbeat has its own threads and uses no collective, so it works in every phase of a run and while
collectives hang.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from isthmus.engine.local_store import local_store
from isthmus.engine.trace_region import current_region, trace_region
from isthmus.errors import Hang, IsthmusError, Preempted, UnsafeInput, explain, is_lost_rank, printable
from isthmus.launch.first_failure import Failure, posted_failure, this_machine
from isthmus.launch.local_launcher import SECOND_REQUEST_S
from isthmus.launch.run_token import sealed, unsealed
from isthmus.platforms import rank_env
from isthmus.platforms.network_interfaces import GLOO, NCCL, named_by

GRACE_S = 3.0
"""Time for a rank to exit by itself after the failure of another rank."""
LOST_S = 90.0
"""A rank or a store without an answer for this long is lost; collectives may wait longer, for a slow rank."""
_PERIOD_S = 1.0
_LEAVING, _FINISHED = "leaving, because another rank does not answer", "finished"
_ADVICE = "See its log and its machine; the same command resumes from the last checkpoint."


def open_store(timeout_s: float, *, serves: bool) -> dist.PrefixStore:
    """Connect to the rendezvous store, or serve it; its keys belong to this attempt, since a torchrun agent keeps its
    store when it restarts the ranks.
    """
    store: dist.Store | None = local_store()
    if store is None:
        address, port = rank_env.master()
        listener = _listener(address, port) if serves else None
        store = dist.TCPStore(
            address,
            port,
            rank_env.world_size(),
            is_master=serves,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=None if listener is None else listener.detach(),
            timeout=timedelta(seconds=timeout_s),
        )
    return dist.PrefixStore(f"attempt_{rank_env.attempt()}", store)


def _listener(host: str, port: int) -> socket.socket | None:
    """A socket that listens at the address of ``host`` only; None: the store listens on all interfaces.

    Other machines may know a host name by another address: it must be an address itself, or that of the interface that
    is chosen for the collectives. None too if this process serves the port already, whose store torch then shares.
    """
    with suppress(OSError):
        addresses = {(info[0], str(info[4][0])) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        (family, address), *others = addresses
        chosen = [interface.address for name in (GLOO, NCCL) if (interface := named_by(name)) is not None]
        is_alone = rank_env.world_size() == rank_env.local_world_size()
        if not others and (host == address or address in chosen or is_alone):
            return socket.create_server((address, port), family=family)
    return None


class Heartbeat:
    """A context manager that posts the failure of its block; after ``start`` it also watches the other ranks."""

    first: Failure | None = None
    """The first failure of the run, after this process left the block because of a failure."""

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s`` is the limit of collectives; if it is below ``LOST_S``, it is that of heartbeats too."""
        self._timeout_s, self._lost_s = timeout_s, min(timeout_s, LOST_S)
        self._rank, self._world_size = rank_env.rank(), rank_env.world_size()
        self._lock = threading.Lock()
        self._ended, self._closed = threading.Event(), threading.Event()
        self._count = self._answers = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._first: Failure | None = None
        self._signals = socket.socketpair()
        """Python's handler of C signals writes their numbers to the second one."""
        self._signals[1].setblocking(False)
        self._wakeup_fd: int | None = None
        """That of the program before."""
        # Its own connection, since that of the main thread blocks while it waits for a key.
        self._store = open_store(min(30.0, timeout_s), serves=False)

    def start(self) -> None:
        """Send and watch heartbeats until the block ends."""
        self._send(current_region())
        for name, target in (("heartbeat", self._run), ("store watchdog", self._watch_store)):
            threading.Thread(target=target, name=name, daemon=True).start()
        if rank_env.stop_file() is None:  # else the launcher kills the ranks
            with suppress(ValueError):  # outside the main thread, where Python forbids it
                self._wakeup_fd = signal.set_wakeup_fd(self._signals[1].fileno(), warn_on_full_buffer=False)
                threading.Thread(target=self._watch_interrupts, name="second Ctrl-C", daemon=True).start()

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        """Post the failure of the block; raises that of another rank if it is the cause."""
        lost = is_lost_rank(error)
        cause = self._cause(error) if error is not None and lost else None
        self._ended.set()
        if self._wakeup_fd is not None:
            signal.set_wakeup_fd(self._wakeup_fd)
        if error is None or isinstance(error, Preempted):
            with suppress(RuntimeError):
                self._send(_FINISHED)
        else:
            if cause is None:
                code, message = explain(error)
                cause = Failure(exit_code=code, message=message)
            Heartbeat.first = self._post(cause)
        self._closed.set()
        if error is not None and rank_env.hosts_store():
            time.sleep(2 * _PERIOD_S)  # the other ranks read the failure from this process
        if lost and Heartbeat.first is not None:
            raise Heartbeat.first.error from error

    def _cause(self, error: BaseException) -> Failure:
        """The failure of another rank that made a collective of this rank fail with ``error``."""
        with trace_region(_LEAVING):
            deadline = time.monotonic() + GRACE_S + 2 * _PERIOD_S
            while time.monotonic() < deadline:
                if (failure := self._failure(range(self._world_size), GRACE_S)) is not None:
                    return failure
                time.sleep(_PERIOD_S / 2)
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        ranks = "; ".join(self._described(rank) for rank in range(self._world_size))
        return Failure(
            exit_code=Hang.exit_code,
            message=f"rank {self._rank} waited for another rank and got no answer (parallel.timeout_s="
            f"{self._timeout_s:g}): {first_line}. The ranks: {ranks}. Find out which of them hangs and why, or raise "
            "parallel.timeout_s.",
        )

    def _run(self) -> None:
        before_s = time.monotonic()
        while not self._ended.wait(_PERIOD_S):
            now_s = time.monotonic()
            if now_s - before_s > 10 * _PERIOD_S:
                self._seen.clear()  # this process was stopped, and the others may have been too
            before_s = now_s
            with suppress(RuntimeError):
                self._send(current_region())
            if (failure := self._failure([(self._rank + 1) % self._world_size], self._lost_s)) is not None:
                # The main thread may raise the actual error, or the run has just ended.
                if not self._ended.wait(GRACE_S):
                    _leave(failure)
                return
            self._answers += 1

    def _watch_store(self) -> None:
        """Leave if the store keeps the other threads waiting: a request to a machine that is down has no time limit."""
        answers, waited_s = -1, 0.0
        while not self._closed.wait(_PERIOD_S):
            # Counted in periods, since this process may have been stopped too.
            answers, waited_s = self._answers, waited_s + _PERIOD_S if answers == self._answers else 0.0
            if waited_s > self._lost_s:
                _leave(Failure(exit_code=Hang.exit_code, message=f"{self._no_store()} {_ADVICE}"))

    def _watch_interrupts(self) -> None:
        """Leave at a second Ctrl-C: the main thread handles no signal while it waits in a collective."""
        first_s = math.inf
        while number := self._signals[0].recv(1):
            now_s = time.monotonic()
            if number[0] == signal.SIGINT and now_s - first_s > SECOND_REQUEST_S:
                failure = Failure(exit_code=130, message="killed; unsaved progress is lost.")
                thread = threading.Thread(target=self._post, args=(failure,), daemon=True)
                thread.start()
                thread.join(2 * _PERIOD_S)  # the store may not answer
                _leave(failure)
            if number[0] == signal.SIGINT:
                first_s = min(first_s, now_s)

    def _no_store(self) -> str:
        address, port = rank_env.master()
        return f"rank 0 or its launcher has ended, or its machine is down: {address}:{port} does not answer any more."

    def _failure(self, ranks: Iterable[int], timeout_s: float) -> Failure | None:
        """The posted failure, or that one of ``ranks`` has sent no heartbeat for ``timeout_s``."""
        if self._first is not None:
            return self._first
        try:
            with self._lock:
                self._first = posted_failure(self._store)
            if self._first is not None:
                return self._first
            silent = [
                self._described(rank) for rank in ranks if rank != self._rank and self._is_silent(rank, timeout_s)
            ]
            if not silent:
                return None
            reason = f"no heartbeat any more of {'; '.join(silent)}. Its process was killed or stopped, or its machine "
            reason += "is down."
        except UnsafeInput as error:
            return self._post(Failure(exit_code=error.exit_code, message=str(error)))
        except RuntimeError:
            reason = self._no_store()
        return self._post(Failure(exit_code=Hang.exit_code, message=f"{reason} {_ADVICE}"))

    def _is_silent(self, rank: int, timeout_s: float) -> bool:
        _, count, region = self._read(rank)
        now_s = time.monotonic()
        seen, since_s = self._seen.get(rank, (-1, now_s))
        if count != seen:
            self._seen[rank] = (count, now_s)
        has_left = region == _FINISHED or _LEAVING in region
        return count == seen and not has_left and now_s - since_s > timeout_s

    def _described(self, rank: int) -> str:
        host, _, region = self._read(rank)
        return f"rank {rank} on {host}, last in {region or 'between steps'}"

    def _read(self, rank: int) -> tuple[str, int, str]:
        """Host, count and trace region of a rank's last heartbeat."""
        key = f"heartbeat/{rank}"
        if (path := _heartbeat_file(rank)) is not None:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
        else:
            with self._lock:
                text = unsealed(key, self._store.get(key)) if self._store.check([key]) else ""
        return tuple(json.loads(text)) if text else ("", -1, _FINISHED)

    def _send(self, region: str) -> None:
        self._count += 1
        text = json.dumps([socket.gethostname(), self._count, region])
        if (path := _heartbeat_file(self._rank)) is not None:
            with suppress(OSError):  # the launcher removes its folder at the end, or the disk is full
                new = path.with_suffix(".new")
                new.write_text(text, encoding="utf-8")
                new.replace(path)
            return
        with self._lock:
            key = f"heartbeat/{self._rank}"
            self._store.set(key, sealed(key, text))

    def _post(self, failure: Failure) -> Failure:
        with self._lock:
            if self._first is None:
                try:
                    self._first = failure.post(self._store)
                except RuntimeError:
                    self._first = failure
            return self._first


def _heartbeat_file(rank: int) -> Path | None:
    """Where a rank of ``--nproc`` writes its heartbeat: a file store never removes old values, and would grow."""
    store = rank_env.store_file()
    return None if store is None else store.with_name(f"heartbeat-{rank}")


def leave(error: IsthmusError) -> NoReturn:
    """End this rank with ``error``, which rank 0 prints, although its main thread may wait in a collective."""
    _leave(Failure(exit_code=error.exit_code, message=str(error) if rank_env.rank() == 0 else ""))


def _leave(failure: Failure) -> NoReturn:
    """End this process without its main thread, which may hang in a collective."""
    # The launcher finds the cause among the error files of all ranks, by time.
    replace(failure, rank=rank_env.rank(), machine=this_machine(), time_s=time.time()).write()
    if rank_env.stop_file() is None and (line := failure.line()):
        with suppress(OSError):
            print(f"isthmus: {printable(line)}", file=sys.stderr, flush=True)
    # A rank of --nproc that saved counts as successful, or torch elastic would stop the others while they save.
    saved = failure.exit_code == Preempted.exit_code and rank_env.stop_file() is not None
    os._exit(0 if saved else failure.exit_code)
