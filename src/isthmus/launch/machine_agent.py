"""The machine agent: the one rank of a machine that asks the rendezvous store, for all ranks of its machine.

The store is a single process, which 16,384 ranks would ask several times a second each. An agent publishes the members
of its machine once, writes one heartbeat for all of them, reads that of one other machine, and passes failures on in
both directions.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch.distributed as dist

from isthmus.errors import Hang, explain
from isthmus.launch.first_failure import ALARM, MEMBERS, Failure, posted_failure
from isthmus.launch.machine_folder import FINISHED, LEAVING, Beat, MachineFolder, described, loads
from isthmus.launch.run_token import sealed, unsealed
from isthmus.platforms import rank_env

RECORDS, JOINED = "rendezvous/records", "rendezvous/joined"
"""Store keys of the members, a line for each, and of their number."""
RANKS = "{ranks}"
"""Placeholder in a message for the last trace region of all ranks."""
ADVICE = "See its log and its machine; the same command resumes from the last checkpoint."
_RELAY_S = 0.1
"""Between two readings of the folder."""
_UNPUBLISHED_S = 1.0
"""Time that the first member of a machine waits for the others, so that one request publishes all of them."""
_CONNECTED, ALL_CONNECTED, _DESCRIBED = "rendezvous/connected", "rendezvous/all connected", "described"


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineMembers:
    """What rank 0 decides about the members of a machine."""

    agents: int
    """Number of machines."""
    index: int
    """Number of this machine."""
    nonces: Mapping[str, str]
    """The nonce of each rank of this machine."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """The member after each rank of this machine, if it is on another one."""

    @property
    def ranks(self) -> list[int]:
        return [int(rank) for rank in self.nonces]

    def dumps(self) -> str:
        return json.dumps(asdict(self))


def machine_key(agent: int) -> str:
    """Store key of the :class:`MachineMembers` whose agent is rank ``agent``."""
    return f"{MEMBERS}/{agent}"


def post_heartbeat(store: dist.Store, index: int, beat: Beat) -> None:
    """Write the heartbeat of machine ``index``."""
    key = f"heartbeat/{index}"
    store.set(key, sealed(key, beat.dumps()))


def no_store() -> str:
    address, port = rank_env.master()
    return f"rank 0 or its launcher has ended, or its machine is down: {address}:{port} does not answer any more."


def no_heartbeat(silent: str) -> Failure:
    reason = f"no heartbeat any more of {silent}. Its process was killed or stopped, or its machine is down."
    return Failure(exit_code=Hang.exit_code, message=f"{reason} {ADVICE}")


class MachineAgent:
    """Passes on what the ranks of a machine and the rendezvous store have for each other, in a thread."""

    def __init__(
        self, store: dist.Store, folder: MachineFolder, *, period_s: float, grace_s: float, lost_s: float
    ) -> None:
        """``store`` is used by the thread only; a machine is lost after ``lost_s``, or ``grace_s`` after an alarm."""
        self._store, self._folder = store, folder
        self._period_s, self._grace_s, self._lost_s = period_s, grace_s, lost_s
        self.limit_s: float = lost_s
        """Time without heartbeat after which a rank is lost."""
        self.answers: int = 0
        """Counts the passes of the thread, which hangs while the store does not answer."""
        self.machine: MachineMembers | None = None
        """Set when the run starts."""
        self._published: set[int] = set()
        self._first_s: float | None = None
        self._counts_connected = True
        self._describes: bool | None = None
        """Whether this agent was the first to describe all ranks."""
        self._described_s = 0.0
        self._seen: tuple[int, float] | None = None
        self._before: tuple[float, list[Beat]] | None = None
        self._step_s = 0.0
        self._count = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine agent", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread, after it has marked this machine as finished."""
        self._closed.set()
        if self.is_running:
            self._thread.join(2 * self._period_s)  # the store may not answer

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._closed.wait(_RELAY_S):
                self.relay()
                self.answers += 1
            if self.machine is not None and self.machine.agents > 1:
                self._send({FINISHED: self.machine.ranks})
        except RuntimeError:  # a DistError of a TCPStore
            if self.machine is not None:  # else the rendezvous raises it
                self._folder.post(Failure(exit_code=Hang.exit_code, message=f"{no_store()} {ADVICE}"))
        except Exception as error:  # such as UnsafeInput: a value of another process
            code, message = explain(error)
            self._folder.post(Failure(exit_code=code, message=message))

    def relay(self) -> None:
        """Pass on what is new; asks the store only if something is, and once in a period of the run."""
        if self.machine is None:
            self._publish_members()
        for rank in self._folder.ranks_with("posted"):
            self._post(rank)
        now_s = time.monotonic()
        if self.machine is not None and now_s - self._step_s >= self._period_s:
            if now_s - self._step_s > 10 * self._period_s:
                self._seen = self._before = None  # this process was suspended, and the others may have been too
            self._step_s = now_s
            self._watch(self.machine)
        if self.machine is not None and self.machine.agents > 1 and self._counts_connected:
            self._count_connected(self.machine)

    def _publish_members(self) -> None:
        new = [rank for rank in self._folder.ranks_with("member") if rank not in self._published]
        if not new:
            return
        now_s = time.monotonic()
        self._first_s = self._first_s or now_s
        if len(new) + len(self._published) >= rank_env.local_world_size() or now_s - self._first_s > _UNPUBLISHED_S:
            lines = [f"{sealed(RECORDS, self._folder.read(f'member-{rank}') or '')}\n" for rank in new]
            self._store.append(RECORDS, "".join(lines))  # type: ignore[attr-defined]  # missing in torch's stubs
            self._store.add(JOINED, len(new))
            self._published.update(new)
            self._first_s = None

    def _post(self, rank: int) -> None:
        """Post the failure that ``rank`` of this machine has written."""
        text = self._folder.read(f"posted-{rank}")
        if text is None or self._folder.failure() is not None:
            return
        failure = Failure(**json.loads(text))
        if RANKS in failure.message:  # one agent asks for all machines, and the others wait for its message
            now_s = time.monotonic()
            if self._describes is None:
                self._describes = self._store.add(_DESCRIBED, 1) == 1
                self._described_s = now_s + (0.0 if self._describes else self._grace_s)
            if now_s < self._described_s:
                return
            beats = self._all_beats() if self._describes else self._local_beats()
            failure = replace(failure, message=failure.message.replace(RANKS, described(beats)))
        self._folder.post(failure.post(self._store))

    def _count_connected(self, machine: MachineMembers) -> None:
        """Count the ranks of this machine that reach the next machine; the last agent ends the wait of all."""
        if len(self._folder.ranks_with("connected")) < len(machine.ranks):
            return
        self._counts_connected = False
        if self._store.add(_CONNECTED, len(machine.ranks)) == rank_env.world_size():
            self._store.set(ALL_CONNECTED, "")

    def _watch(self, machine: MachineMembers) -> None:
        beats = self._local_beats()
        regions: dict[str, list[int]] = {}
        for beat in beats:
            for region, ranks in beat.regions.items():
                regions.setdefault(region, []).extend(ranks)
        if machine.agents > 1:
            self._send(regions)
        alarm = self._store.check([ALARM])
        if not alarm and any(LEAVING in region for region in regions):
            alarm = self._store.add(ALARM, 1) > 0
        if alarm:
            self.limit_s = min(self._grace_s, self._lost_s)
            if (failure := posted_failure(self._store)) is not None:
                self._folder.post(failure)
                return
        if machine.agents > 1:
            self._watch_next(machine)

    def _watch_next(self, machine: MachineMembers) -> None:
        """Watch the heartbeat of the next machine; if it is silent, name all silent ones."""
        now_s = time.monotonic()
        if self._before is not None:
            since_s, before = self._before
            if now_s - since_s < self._grace_s:
                return
            self._before = None
            pairs = zip(before, self._all_beats(), strict=True)
            silent = [beat for beat, after in pairs if beat.count == after.count and not after.has_left]
            if silent:
                self._folder.post(no_heartbeat(described(silent)).post(self._store))
            return
        beat = self._read((machine.index + 1) % machine.agents)
        count, since_s = self._seen or (-1, now_s)
        if beat.count != count:
            self._seen = (beat.count, now_s)
        elif not beat.has_left and now_s - since_s > self._suspicious_s:
            self._before = (now_s, self._all_beats())

    @property
    def _suspicious_s(self) -> float:
        """Silence of the next machine after which all are compared; after an alarm, half of that of a lost rank, since
        a machine is named only if it stays silent for the grace time after that.
        """
        return self.limit_s if self.limit_s == self._lost_s else self.limit_s / 2

    def _send(self, regions: Mapping[str, list[int]]) -> None:
        assert self.machine is not None
        self._count += 1
        post_heartbeat(self._store, self.machine.index, Beat(socket.gethostname(), self._count, dict(regions)))

    def _read(self, index: int) -> Beat:
        key = f"heartbeat/{index}"
        # Does not set it, since rank 0 has: a request less than `get`, which waits for a key first.
        return loads(unsealed(key, self._store.compare_set(key, "", "")))

    def _local_beats(self) -> list[Beat]:
        ranks = self.machine.ranks if self.machine is not None else self._folder.ranks_with("heartbeat")
        return [self._folder.heartbeat(rank) for rank in ranks]

    def _all_beats(self) -> list[Beat]:
        """The heartbeats of all machines, in one request."""
        if self.machine is None or self.machine.agents == 1:
            return self._local_beats()
        keys = [f"heartbeat/{index}" for index in range(self.machine.agents)]
        return [loads(unsealed(key, value)) for key, value in zip(keys, self._store.multi_get(keys), strict=True)]
