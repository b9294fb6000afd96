"""How the ranks of a run find each other: within a time limit, and with a word on who is missing or out of reach.

torch's own rendezvous waits without saying for whom, and a collective over an address that nobody else can reach waits
until it times out. Here the ranks first meet in the store of rank 0's machine: each leaves its name and the address
that its collectives will use, and rank 0 decides for all. Then every rank knocks at the next one's address.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from isthmus.errors import Hang, IsthmusError, UsageError
from isthmus.platforms.network_interfaces import GLOO, NCCL, Interface, interfaces, named_by, route_to

KNOCK_S = 10.0
"""How long one rank tries to reach another, at most."""
_SLACK_S = 10.0
"""What a rank waits for rank 0's decision beyond the time limit that rank 0 itself keeps."""
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A rank that has joined."""

    rank: int
    world_size: int
    host: str
    """What its machine calls itself."""
    address: str
    """From which it reaches rank 0's machine; ranks that share it share a machine."""
    doors: list[tuple[str, str, int]]
    """(what chose it, address, port) where it listens, each on an interface that its collectives will use."""


def master() -> tuple[str, int]:
    """Address and port of the store that the ranks meet in.

    Raises:
        UsageError: the environment has none, or a port that is none.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(
            f"the environment has RANK and WORLD_SIZE, but MASTER_ADDR={address!r} and MASTER_PORT={port!r}. Set them "
            "to the machine of rank 0 and a free port of it, the same on every rank, or start with torchrun."
        )
    return address, int(port)


def meet(rank: int, world_size: int, *, collective_backend: str, timeout_s: float) -> tuple[dist.Store, str]:
    """Join the other ranks.

    Between machines, ``GLOO_SOCKET_IFNAME`` is set to the interface that leads to rank 0, unless it is set.

    Args:
        rank: of this process.
        world_size: ranks that are to come.
        collective_backend: ``gloo`` or ``nccl``, which has an interface of its own.
        timeout_s: how long to wait for the others.

    Returns:
        The store that they share, and who met where, for the user; empty on one machine.

    Raises:
        UsageError: the variables of the rendezvous do not fit, or an interface is not there.
        Hang: a rank did not come, or cannot be reached.
    """
    deadline = time.monotonic() + timeout_s
    chosen = {variable: named_by(variable) for variable in (GLOO, *((NCCL,) if collective_backend == "nccl" else ()))}
    store = _open_store(rank, world_size, deadline, timeout_s)
    address, _ = master()
    own = route_to(address)
    chosen = {f"{name}={os.environ[name]}": one for name, one in chosen.items() if one} or {"the way to rank 0": own}
    with _Doors(rank, {why: one for why, one in chosen.items() if one}) as doors:
        me = Member(
            rank=rank,
            world_size=world_size,
            host=socket.gethostname(),
            address=own.address if own else "",
            doors=doors.places,
        )
        members = _roll_call(store, me, deadline, timeout_s)
        if len({one.address for one in members}) == 1:
            return store, ""
        if own and GLOO not in os.environ:
            os.environ[GLOO] = own.name
        _knock_all(store, me, members, deadline)
    return store, f"{world_size} ranks: {said(members)}"


def _open_store(rank: int, world_size: int, deadline: float, timeout_s: float) -> dist.Store:
    address, port = master()
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not hosts:
        _wait_for_door(rank, address, port, deadline, timeout_s)
    try:
        return dist.TCPStore(
            address,
            port,
            world_size,
            is_master=hosts,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(seconds=max(1.0, deadline - time.monotonic()) + _SLACK_S),
        )
    except dist.DistNetworkError as error:
        if hosts and "EADDRINUSE" in str(error):
            raise UsageError(
                f"MASTER_PORT={port} is in use on {socket.gethostname()}. Set another, the same on every rank."
            ) from error
        raise Hang(f"rank {rank} cannot meet the others at {address}:{port}: {error}") from error


def _wait_for_door(rank: int, address: str, port: int, deadline: float, timeout_s: float) -> None:
    """Until somebody listens there; torch's store would print a warning for every try."""
    while True:
        try:
            socket.create_connection((address, port), timeout=max(0.1, min(5.0, deadline - time.monotonic()))).close()
            return
        except OSError as error:
            if time.monotonic() + _POLL_S < deadline:
                time.sleep(4 * _POLL_S)
                continue
            own = route_to(address)
            tried = f"from {own.address}, interface {own.name}" if own else "its machine knows no way there"
            raise Hang(
                f"rank {rank} on {socket.gethostname()} cannot reach rank 0 at {address}:{port}, tried for "
                f"{timeout_s:g} s (parallel.join_timeout_s), {tried}: {error.strerror or error}. See that rank 0 "
                "runs, that MASTER_ADDR and MASTER_PORT are those of its machine, and that no firewall is between."
            ) from error


def _roll_call(store: dist.Store, me: Member, deadline: float, timeout_s: float) -> list[Member]:
    """All members, by rank; the same on every rank, as rank 0 has seen them."""

    def decide() -> Any:
        _until(lambda: store.add("meeting/joined", 0) >= me.world_size, deadline)
        came = [rank for rank in range(me.world_size) if store.check([f"meeting/member/{rank}"])]
        members = [Member(**json.loads(store.get(f"meeting/member/{rank}"))) for rank in came]
        other = next((one for one in members if one.world_size != me.world_size), None)
        if other:
            raise UsageError(
                f"rank 0 was started as one of {me.world_size} ranks, rank {other.rank} on {other.host} as one of "
                f"{other.world_size}. Set WORLD_SIZE alike everywhere."
            )
        missing = [rank for rank in range(me.world_size) if rank not in came]
        if missing:
            address, port = master()
            raise Hang(
                f"{len(came)} of {me.world_size} ranks have joined in {timeout_s:g} s (parallel.join_timeout_s). "
                f"Missing: {spans(missing)}. Joined: {said(members)}. They meet at {address}:{port}. See in the "
                "logs of the missing ranks why they did not start, or whether their machines reach that address."
            )
        return [asdict(one) for one in members]

    if store.add(f"meeting/taken/{me.rank}", 1) > 1:
        raise UsageError(f"there is a rank {me.rank} already. Give every process a RANK of its own.")
    store.set(f"meeting/member/{me.rank}", json.dumps(asdict(me)))
    store.add("meeting/joined", 1)
    return [Member(**one) for one in _decision(store, me, "members", decide, deadline)]


def _knock_all(store: dist.Store, me: Member, members: Sequence[Member], deadline: float) -> None:
    """Try the way from every machine to the next, and agree on whether all are open."""
    deadline = max(deadline, time.monotonic() + KNOCK_S) + KNOCK_S
    other = members[(me.rank + 1) % len(members)]
    if other.address != me.address:
        closed = _knock(other)
        if closed:
            why, place, trouble = closed
            store.set(
                f"meeting/closed/{me.rank}",
                f"rank {me.rank} on {me.host} ({me.address}) cannot reach rank {other.rank} on {other.host} at "
                f"{place} ({why}): {trouble}. Name the interface that connects the machines in {GLOO} and {NCCL} "
                f"on each of them (here: {', '.join(map(str, interfaces()))}), and see that no firewall is between.",
            )
    store.add("meeting/knocked", 1)

    def decide() -> Any:
        _until(lambda: store.add("meeting/knocked", 0) >= len(members), deadline)
        for one in members:
            if store.check([f"meeting/closed/{one.rank}"]):
                raise Hang(store.get(f"meeting/closed/{one.rank}").decode())
        return None

    _decision(store, me, "ways", decide, deadline)


def _knock(other: Member) -> tuple[str, str, str] | None:
    """The first door of ``other`` that does not open: what chose it, where it is, and what happened."""
    for why, address, port in other.doors:
        try:
            with socket.create_connection((address, port), timeout=KNOCK_S) as caller:
                caller.settimeout(KNOCK_S)
                if caller.recv(32) != f"rank {other.rank}".encode():
                    return why, f"{address}:{port}", "somebody else answers there"
        except OSError as error:
            return why, f"{address}:{port}", str(error.strerror or error)
    return None


class _Doors:
    """Listens on this rank's addresses and says its name to whoever comes, for as long as it is entered."""

    def __init__(self, rank: int, chosen: dict[str, Interface]) -> None:
        self._name = f"rank {rank}".encode()
        self._sockets: list[socket.socket] = []
        self.places: list[tuple[str, str, int]] = []
        for why, one in chosen.items():
            family = socket.AF_INET6 if ":" in one.address else socket.AF_INET
            with suppress(OSError):
                door = socket.create_server((one.address, 0), family=family)
                self._sockets.append(door)
                self.places.append((f"interface {one.name}, {why}", one.address, door.getsockname()[1]))

    def __enter__(self) -> _Doors:
        for door in self._sockets:
            threading.Thread(target=self._answer, args=(door,), name="meeting", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        for door in self._sockets:
            with suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
            door.close()

    def _answer(self, door: socket.socket) -> None:
        while True:
            try:
                caller, _ = door.accept()
            except OSError:
                return
            with caller, suppress(OSError):
                caller.sendall(self._name)


def _decision(store: dist.Store, me: Member, name: str, decide: Callable[[], Any], deadline: float) -> Any:
    """What rank 0 decides, on every rank: its answer, or the error it raises."""
    key = f"meeting/{name}"
    if me.rank == 0:
        try:
            answer = decide()
        except IsthmusError as error:
            store.set(key, json.dumps({"code": error.exit_code, "told": str(error)}))
            # This process may hold the store: it stays until those who came have read it.
            came = store.add("meeting/joined", 0)
            _until(lambda: store.add(f"{key}/heard", 0) >= came - 1, time.monotonic() + 5.0)
            raise
        store.set(key, json.dumps({"answer": answer}))
        return answer
    try:
        store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic()) + _SLACK_S))
        decided = json.loads(store.get(key))
        if "told" in decided:
            store.add(f"{key}/heard", 1)
    except dist.DistError as error:
        address, port = master()
        raise Hang(f"rank {me.rank} on {me.host} lost rank 0 ({address}:{port}) while the ranks met.") from error
    if "told" in decided:
        heard = IsthmusError(decided["told"])
        heard.exit_code = decided["code"]
        raise heard
    return decided["answer"]


def _until(done: Callable[[], bool], deadline: float) -> None:
    while not done() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def said(members: Sequence[Member]) -> str:
    """Who is on which machine: ``ranks 0-7 on node0 (10.0.0.1), ranks 8-15 on node1 (10.0.0.2)``."""
    machines: dict[tuple[str, str], list[int]] = {}
    for one in members:
        machines.setdefault((one.host, one.address), []).append(one.rank)
    return ", ".join(f"{spans(ranks)} on {host} ({address})" for (host, address), ranks in machines.items()) or "none"


def spans(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    parts: list[str] = []
    for rank in ranks:
        if parts and rank - 1 == int(parts[-1].rpartition("-")[2]):
            parts[-1] = f"{parts[-1].partition('-')[0]}-{rank}"
        else:
            parts.append(str(rank))
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
