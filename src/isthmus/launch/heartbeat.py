"""The heartbeat of the ranks, which detects ranks that failed or hang.

Each rank writes a heartbeat to the folder of its machine about once a second. The machine agent reads those of its
machine, and the other ranks that of the agent. If one stops for ``LOST_S`` or its process ends, if any rank posts a
failure, or if the rendezvous store does not answer, the rank exits with a message that names the cause. The heartbeat
has its own threads and uses no collective, so it works in every phase of a run and while collectives hang.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from isthmus.engine.local_store import local_store
from isthmus.engine.trace_region import current_region, trace_region
from isthmus.errors import Hang, IsthmusError, Preempted, UsageError, explain, is_lost_rank, printable
from isthmus.launch.first_failure import Failure, this_machine
from isthmus.launch.local_launcher import SECOND_REQUEST_S
from isthmus.launch.machine_agent import ADVICE, RANKS, MachineAgent, MachineMembers, no_heartbeat, no_store
from isthmus.launch.machine_folder import FINISHED, LEAVING, MachineFolder, described
from isthmus.platforms import rank_env
from isthmus.platforms.network_interfaces import GLOO, NCCL, named_by

GRACE_S = 3.0
"""Time for a rank to exit by itself after the failure of another rank."""
LOST_S = 90.0
"""A rank or a store without an answer for this long is lost; collectives may wait longer, for a slow rank."""
_PERIOD_S = 1.0
_OTHER_FILES = 512
"""Open files of a rank besides connections to its store."""


def open_store(timeout_s: float, *, serves: bool) -> dist.PrefixStore:
    """Connect to the rendezvous store, or serve it; its keys belong to this attempt, since a torchrun agent keeps its
    store when it restarts the ranks.
    """
    store: dist.Store | None = local_store()
    if store is None:
        address, port = rank_env.master()
        if serves:
            _allow_connections(rank_env.world_size(), rank_env.local_world_size())
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


def _allow_connections(ranks: int, local_ranks: int) -> None:
    """Let this process have an open file for the connection of each rank and of each machine agent."""
    needed = ranks + math.ceil(ranks / local_ranks) + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (resource.RLIM_INFINITY, max(hard, needed)):
        raise UsageError(
            f"rank 0 serves the rendezvous store to {ranks} ranks and needs {needed} open files; its limit is {hard} "
            f"(ulimit -Hn). Set it to {needed} or more, such as LimitNOFILE of the service that starts the ranks."
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


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
    current: Heartbeat | None = None
    """That of this process, in its block."""

    def __init__(self, timeout_s: float, folder: MachineFolder) -> None:
        """``timeout_s`` is the limit of collectives; if it is below ``LOST_S``, it is that of heartbeats too."""
        self._timeout_s, self._lost_s = timeout_s, min(timeout_s, LOST_S)
        self._rank, self._folder = rank_env.rank(), folder
        self._ended, self._closed = threading.Event(), threading.Event()
        self._watched: list[int] = []
        self._seen: dict[int, tuple[int, float]] = {}
        self._answers, self._waited_s = -1, 0.0
        self._signals = socket.socketpair()
        """Python's handler of C signals writes their numbers to the second one."""
        self._signals[1].setblocking(False)
        self._wakeup_fd: int | None = None
        """That of the program before."""
        self._agent: MachineAgent | None = None
        if folder.is_agent:  # its own connection, since that of the main thread blocks while it waits for a key
            store = open_store(min(30.0, timeout_s), serves=False)
            limits = {"period_s": _PERIOD_S, "grace_s": GRACE_S, "lost_s": self._lost_s}
            self._agent = MachineAgent(store, folder, **limits)

    def start(self, machine: MachineMembers) -> None:
        """Send and watch heartbeats until the block ends."""
        self._folder.beat(current_region())
        self._watched = [rank for rank in machine.ranks if rank != self._rank]
        if self._agent is not None:
            self._agent.machine = machine
        else:
            self._watched = [self._folder.agent]
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()
        if rank_env.stop_file() is None:  # else the launcher kills the ranks
            with suppress(ValueError):  # outside the main thread, where Python forbids it
                self._wakeup_fd = signal.set_wakeup_fd(self._signals[1].fileno(), warn_on_full_buffer=False)
                threading.Thread(target=self._watch_interrupts, name="second Ctrl-C", daemon=True).start()

    def __enter__(self) -> Heartbeat:
        Heartbeat.current = self
        if self._agent is not None:
            self._agent.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        """Post the failure of the block; raises that of another rank if it is the cause."""
        lost = is_lost_rank(error)
        cause = self._cause(error) if error is not None and lost else None
        self._ended.set()
        if self._wakeup_fd is not None:
            signal.set_wakeup_fd(self._wakeup_fd)
        if error is None or isinstance(error, Preempted):
            self._folder.beat(FINISHED)
            # The agent passes failures on to ranks that have not finished.
            deadline_s = time.monotonic() + (GRACE_S if self._agent is not None else 0.0)
            while time.monotonic() < deadline_s and not self._folder.have_left(self._watched):
                time.sleep(_PERIOD_S / 10)
        else:
            if cause is None:
                code, message = explain(error)
                cause = Failure(exit_code=code, message=message)
            Heartbeat.first = self._post(cause)
        self.leave()
        if error is not None and rank_env.hosts_store():
            time.sleep(2 * _PERIOD_S)  # the agents of other machines read the failure from this process
        if lost and Heartbeat.first is not None:
            raise Heartbeat.first.error from error

    def leave(self) -> None:
        """End the heartbeat; the others do not expect one any more."""
        self._closed.set()
        if self._agent is not None:
            self._agent.close()
        self._folder.leave()
        Heartbeat.current = None

    def _cause(self, error: BaseException) -> Failure:
        """The failure of another rank that made a collective of this rank fail with ``error``."""
        with trace_region(LEAVING):
            self._folder.beat(current_region())
            # The agents need the grace time to detect a silent machine, and once more to name all of them.
            deadline = time.monotonic() + 2 * GRACE_S + 2 * _PERIOD_S
            while time.monotonic() < deadline:
                if (failure := self._folder.failure()) is not None:
                    return failure
                time.sleep(_PERIOD_S / 4)
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        return Failure(
            exit_code=Hang.exit_code,
            message=f"rank {self._rank} waited for another rank and got no answer (parallel.timeout_s="
            f"{self._timeout_s:g}): {first_line}. The ranks: {RANKS}. Find out which of them hangs and why, or raise "
            "parallel.timeout_s.",
        )

    def _run(self) -> None:
        before_s = time.monotonic()
        while not self._ended.wait(_PERIOD_S):
            now_s = time.monotonic()
            if now_s - before_s > 10 * _PERIOD_S:
                self._seen.clear()  # this process was stopped, and the others may have been too
            before_s = now_s
            self._folder.beat(current_region())
            if (failure := self._failure()) is not None:
                # The main thread may raise the actual error, or the run has just ended.
                if not self._ended.wait(GRACE_S):
                    _leave(failure)
                return

    def _failure(self) -> Failure | None:
        """The first failure of the run, or that a rank has sent no heartbeat or the store does not answer."""
        silent = [rank for rank in self._watched if self._is_silent(rank)]  # before the failures that explain it
        if (failure := self._folder.failure()) is not None:
            return failure
        if self._hangs():
            return self._folder.post(Failure(exit_code=Hang.exit_code, message=f"{no_store()} {ADVICE}"))
        if not silent:
            return None
        if 0 in silent and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank_env.store_file() is None:
            return self._folder.post(Failure(exit_code=Hang.exit_code, message=f"{no_store()} {ADVICE}"))
        return self._post(no_heartbeat(described(map(self._folder.heartbeat, silent))))

    def _hangs(self) -> bool:
        """Whether the store keeps the agent waiting: a request to a machine that is down has no time limit."""
        if self._agent is None:
            return False
        # Counted in periods, since this process may have been stopped too.
        answers, self._answers = self._answers, self._agent.answers
        self._waited_s = self._waited_s + _PERIOD_S if answers == self._answers else 0.0
        return self._waited_s > self._lost_s

    def _is_silent(self, rank: int) -> bool:
        has_ended = not self._folder.is_alive(rank)
        beat = self._folder.heartbeat(rank)  # after its lock: a rank sends its last heartbeat before it ends
        now_s = time.monotonic()
        count, since_s = self._seen.get(rank, (-2, now_s))
        if beat.count != count:
            self._seen[rank] = (beat.count, now_s)
        limit_s = self._lost_s if self._agent is None else self._agent.limit_s
        return not beat.has_left and (has_ended or (beat.count == count and now_s - since_s > limit_s))

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

    def _post(self, failure: Failure) -> Failure:
        """Post a failure, through the agent if it answers; returns the first one of the run."""
        if self._agent is None or self._agent.is_running:
            self._folder.write(f"posted-{self._rank}", json.dumps(asdict(failure)))
            deadline_s = time.monotonic() + GRACE_S + 2 * _PERIOD_S
            while time.monotonic() < deadline_s and self._folder.is_alive(self._folder.agent):
                if (first := self._folder.failure()) is not None:
                    return first
                time.sleep(_PERIOD_S / 20)
        failure = replace(failure, message=failure.message.replace(RANKS, "unknown"))
        if self._agent is None and self._folder.failure() is None:  # the agent has ended, or does not answer
            with suppress(RuntimeError):
                failure = failure.post(open_store(GRACE_S, serves=False))
        return self._folder.post(failure)


def leave(error: IsthmusError) -> NoReturn:
    """End this rank with ``error``, which rank 0 prints, although its main thread may wait in a collective."""
    _leave(Failure(exit_code=error.exit_code, message=str(error) if rank_env.rank() == 0 else ""))


def _leave(failure: Failure) -> NoReturn:
    """End this process without its main thread, which may hang in a collective."""
    if Heartbeat.current is not None:
        Heartbeat.current.leave()
    # The launcher finds the cause among the error files of all ranks, by time.
    replace(failure, rank=rank_env.rank(), machine=this_machine(), time_s=time.time()).write()
    if rank_env.stop_file() is None and (line := failure.line()):
        with suppress(OSError):
            print(f"isthmus: {printable(line)}", file=sys.stderr, flush=True)
    # A rank of --nproc that saved counts as successful, or torch elastic would stop the others while they save.
    saved = failure.exit_code == Preempted.exit_code and rank_env.stop_file() is not None
    os._exit(0 if saved else failure.exit_code)
