"""The rendezvous of the ranks, with a time limit and errors that name the missing or unreachable rank.

torch's own rendezvous does not name the missing rank, and a collective over an unreachable address hangs until its
timeout. Here every rank first registers with the addresses of its collectives in the folder of its machine, whose agent
publishes them in the store of rank 0. Then every machine connects to the next one.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch.distributed as dist

from isthmus.engine.parallel.process_groups import init_process_group
from isthmus.errors import Hang, IsthmusError, Preempted, UsageError
from isthmus.launch.first_failure import MEMBERS, Failure, posted_failure, this_machine
from isthmus.launch.heartbeat import Heartbeat, open_store
from isthmus.launch.machine_agent import ALL_CONNECTED, JOINED, RECORDS, MachineMembers, machine_key, post_heartbeat
from isthmus.launch.machine_folder import Beat, MachineFolder, open_machine_folder, rank_ranges
from isthmus.launch.run_token import check_ranks, sealed, unsealed
from isthmus.platforms import rank_env
from isthmus.platforms.base import Platform
from isthmus.platforms.network_interfaces import GLOO, NCCL, Interface, interfaces, named_by, route_to

CONNECT_S = 10.0
"""Timeout of a connection to another rank."""
_REPORT_S = 5.0
"""Time that a rank that fails before the rendezvous waits for the others, so that only one prints the failure."""
_SLACK_S = 10.0
"""Extra time that the other ranks wait for the decision of rank 0."""
_POLL_S = 0.05
_STOPPED = "stopped before training began, as requested."


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A registered rank."""

    rank: int = field(default_factory=rank_env.rank)
    world_size: int = field(default_factory=rank_env.world_size)
    machine: list[str] = field(default_factory=this_machine)
    """Host name, and the address with which it reaches rank 0; equal on ranks of the same machine."""
    listeners: list[tuple[str, str, int]]
    """(reason for the choice, address, port), one for each interface of its collectives."""
    agent: int
    """The rank of the agent of its machine."""
    device: str = ""
    """Identifies its GPU on its machine; empty on a CPU."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    """The same in no other run."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.machine[0]} ({self.machine[1]})"


@contextmanager
def join_ranks(
    platform: Platform, *, join_timeout_s: float, timeout_s: float, stopped: Callable[[], bool] = lambda: False
) -> Iterator[str]:
    """Join the other ranks and start torch.distributed; a heartbeat watches them while the block runs.

    Between machines, ``GLOO_SOCKET_IFNAME`` defaults to the interface of the route to rank 0. ``timeout_s`` is for
    collectives; once ``stopped``, rank 0 no longer waits for missing ranks, and raises Preempted. Yields the ranks of
    each machine, for the log of rank 0; empty on the others and on one machine.
    """
    if rank_env.world_size() <= 1 or dist.is_initialized():
        init_process_group(platform, timeout_s=timeout_s)
        yield ""
        return
    joined = rendezvous(platform, join_timeout_s=join_timeout_s, timeout_s=timeout_s, stopped=stopped)
    with ExitStack() as stack:
        try:
            store, machines = stack.enter_context(joined)
        except Hang as error:  # a stopped rank 0 has closed the store
            if stopped():
                raise Preempted(_STOPPED) from error
            raise
        init_process_group(platform, store=store, timeout_s=timeout_s)
        if (token := rank_env.run_token()) is not None:
            check_ranks(token, platform, store.get(MEMBERS))
        yield machines


@contextmanager
def rendezvous(
    platform: Platform, *, join_timeout_s: float, timeout_s: float, stopped: Callable[[], bool] = lambda: False
) -> Iterator[tuple[dist.Store, str]]:
    """Like :func:`join_ranks`, without a process group: yields its store, and the ranks of each machine."""
    deadline = time.monotonic() + join_timeout_s
    variables = (GLOO, NCCL) if platform.collective_backend == "nccl" else (GLOO,)
    chosen = {f"{name}={os.environ[name]}": interface for name in variables if (interface := named_by(name))}
    store = _join_store(join_timeout_s)
    route = route_to(rank_env.master()[0])
    folder = open_machine_folder(store)
    with Heartbeat(timeout_s, folder) as heartbeat:
        with _listening(chosen or ({"the route to rank 0": route} if route else {})) as listeners:
            me = Member(listeners=listeners, device=platform.device_id(), agent=folder.agent)
            machine, machines = _register(store, folder, me, deadline, join_timeout_s, stopped)
            heartbeat.start(machine)
            if machine.agents > 1:
                if route:
                    os.environ.setdefault(GLOO, route.name)
                _connect_to_next(me, machine)
                folder.write(f"connected-{me.rank}")
                store.wait([ALL_CONNECTED], timedelta(days=1))  # the heartbeat ends this rank if one cannot
        store.set_timeout(timedelta(seconds=timeout_s))
        yield store, machines


def report(exit_code: int, message: str, traceback: str = "") -> str:
    """Report the failure of this rank to the other ranks and torch elastic; returns the line to print, if any."""
    failure = Failure(exit_code=exit_code, message=message, traceback=traceback)
    failure.write()
    if exit_code == Preempted.exit_code:
        return message if failure.rank == 0 else ""
    first = Heartbeat.first or _post_before_rendezvous(failure)
    return (failure if first.rank == failure.rank else first).line()


def _post_before_rendezvous(failure: Failure) -> Failure:
    """Post a failure before the rendezvous, such as a config error on all ranks."""
    with suppress(IsthmusError, RuntimeError):
        store = _join_store(_REPORT_S)
        first = failure.post(store)
        store.add(JOINED, 1)
        if rank_env.hosts_store():
            _wait_until(lambda: store.add(JOINED, 0) >= rank_env.world_size(), time.monotonic() + _REPORT_S)
            time.sleep(2 * _POLL_S)
        return first
    return failure


def _join_store(timeout_s: float) -> dist.Store:
    address, port = rank_env.master()
    serves = rank_env.hosts_store()
    try:
        store = open_store(timeout_s, serves=serves)
    except dist.DistError as error:
        if serves and "EADDRINUSE" in str(error):
            raise UsageError(
                f"MASTER_PORT={port} is in use on {socket.gethostname()}. Set another, the same on every rank."
            ) from error
        route = route_to(address)
        source = f"from {route.address}, interface {route.name}" if route else "its machine has no route to it"
        raise Hang(
            f"rank {rank_env.rank()} on {socket.gethostname()} cannot reach rank 0 at {address}:{port}, tried for "
            f"{timeout_s:g} s (parallel.join_timeout_s), {source}: {_connect(address, port) or error}. Check that rank "
            "0 runs, that MASTER_ADDR and MASTER_PORT are those of its machine, and that no firewall blocks them."
        ) from error
    store.set_timeout(timedelta(seconds=timeout_s + _SLACK_S))
    return store


@contextmanager
def _listening(chosen: dict[str, Interface]) -> Iterator[list[tuple[str, str, int]]]:
    """Listen on interfaces, by the reason for their choice; the kernel answers without an accept."""
    with ExitStack() as sockets:
        listeners = []
        for reason, interface in chosen.items():
            family = socket.AF_INET6 if ":" in interface.address else socket.AF_INET
            with suppress(OSError):
                listener = sockets.enter_context(socket.create_server((interface.address, 0), family=family))
                port = listener.getsockname()[1]
                listeners.append((f"interface {interface.name}, {reason}", interface.address, port))
        yield listeners


def _register(
    store: dist.Store,
    folder: MachineFolder,
    me: Member,
    deadline: float,
    timeout_s: float,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[MachineMembers, str]:
    """Register this rank and wait for the others; returns this machine, and on rank 0 the ranks of each machine."""
    folder.write(f"member-{me.rank}", json.dumps(asdict(me)))  # the agent publishes it
    machines = ""
    try:
        if me.rank == 0:
            machines = _assemble(store, me, deadline, timeout_s, stopped)
        wait_s = max(0.1, deadline - time.monotonic()) + _SLACK_S
        if folder.is_agent:
            store.wait([MEMBERS], timedelta(seconds=wait_s))
            if failure := posted_failure(store):
                raise folder.post(failure).error
            key = machine_key(me.rank)
            folder.write("machine", unsealed(key, store.get(key)))
    except RuntimeError as error:  # a DistError of a TCPStore
        raise Hang(f"{me} {_lost()}") from error
    while not folder.read("machine") and not folder.failure() and wait_s > 0 and folder.is_alive(folder.agent):
        time.sleep(_POLL_S)
        wait_s -= _POLL_S
    if failure := folder.failure():
        raise failure.error
    if (text := folder.read("machine")) is None:
        raise Hang(f"{me} {_lost()}")
    machine = MachineMembers(**json.loads(text))
    if machine.nonces.get(str(me.rank)) != me.nonce:
        raise UsageError(f"another process has RANK={me.rank} already. Give every process its own RANK.")
    return machine, machines


def _lost() -> str:
    return f"lost its connection to rank 0 ({':'.join(map(str, rank_env.master()))}) during the rendezvous."


def _assemble(store: dist.Store, me: Member, deadline: float, timeout_s: float, stopped: Callable[[], bool]) -> str:
    """On rank 0: wait for all members, and publish what each machine needs to know; returns the text for the log."""

    def joined() -> bool:
        return store.add(JOINED, 0) >= me.world_size

    _wait_until(lambda: joined() or posted_failure(store) is not None or stopped(), deadline)
    if failure := posted_failure(store):
        raise failure.error
    if stopped() and not joined():
        raise Preempted(_STOPPED)
    members = _all_members(store, me.world_size, timeout_s)
    machines = _machines(members)
    for agent, machine in machines.items():
        store.set(machine_key(agent), sealed(machine_key(agent), machine.dumps()))
        beat = Beat(members[agent].machine[0], 0, {"the rendezvous": machine.ranks})
        post_heartbeat(store, machine.index, beat)  # the agent replaces it
    store.set(MEMBERS, sealed(MEMBERS, secrets.token_hex(16)))
    return f"{len(members)} ranks: {by_machine(members)}" if len(machines) > 1 else ""


def _all_members(store: dist.Store, world_size: int, timeout_s: float) -> list[Member]:
    """On rank 0: all members by rank; raises for a missing rank, another world size or a GPU with two ranks."""
    lines = store.get(RECORDS).decode("utf-8", "replace").splitlines() if store.check([RECORDS]) else []
    members = sorted((Member(**json.loads(unsealed(RECORDS, line))) for line in lines), key=lambda member: member.rank)
    other = next((member for member in members if member.world_size != world_size), None)
    if other:
        raise UsageError(
            f"rank 0 was started with WORLD_SIZE={world_size}, {other} with WORLD_SIZE={other.world_size}. Set the "
            "same WORLD_SIZE on every rank."
        )
    ranks = [member.rank for member in members]
    if (twice := next((rank for rank, following in pairwise(ranks) if rank == following), None)) is not None:
        raise UsageError(f"two processes have RANK={twice}. Give every process its own RANK.")
    if missing := sorted(set(range(world_size)) - set(ranks)):
        raise Hang(
            f"{len(members)} of {world_size} ranks have joined in {timeout_s:g} s (parallel.join_timeout_s). Missing: "
            f"{rank_ranges(missing)}. Joined: {by_machine(members)}. The rendezvous is at "
            f"{':'.join(map(str, rank_env.master()))}. See in the logs of the missing ranks why they did not start, or "
            "whether their machines reach that address."
        )
    _check_devices(members)
    return members


def _machines(members: Sequence[Member]) -> dict[int, MachineMembers]:
    """What each machine needs to know, by the rank of its agent."""
    nonces: dict[int, dict[str, str]] = {}
    others: dict[int, dict[str, Any]] = {}
    for member in members:
        nonces.setdefault(member.agent, {})[str(member.rank)] = member.nonce
        other = members[(member.rank + 1) % len(members)]
        if other.machine[1] != member.machine[1]:
            others.setdefault(member.agent, {})[str(member.rank)] = asdict(other)
    return {
        agent: MachineMembers(agents=len(nonces), index=index, nonces=nonces[agent], others=others.get(agent, {}))
        for index, agent in enumerate(sorted(nonces))
    }


def _check_devices(members: Sequence[Member]) -> None:
    """Refuse ranks of a machine that use the same GPU, with which NCCL fails."""
    users: dict[tuple[str, ...], list[Member]] = {}
    for member in members:
        users.setdefault((*member.machine, member.device), []).append(member)
    for ranks in users.values():
        if len(ranks) > 1 and (device := ranks[0].device):
            raise UsageError(
                f"{rank_ranges([member.rank for member in ranks])} on {ranks[0].machine[0]} use the same GPU "
                f"({device.partition(',')[0]}). Start one rank per GPU; under Slurm, --gpus-per-task=1 gives each task "
                "its own."
            )


def _connect_to_next(me: Member, machine: MachineMembers) -> None:
    """Connect to every listener of the next rank, if it is on another machine."""
    other = Member(**machine.others[str(me.rank)]) if str(me.rank) in machine.others else None
    for reason, address, port in other.listeners if other else ():
        if reason_failed := _connect(address, port):
            raise Hang(
                f"{me} cannot reach {other} at {address}:{port} ({reason}): {reason_failed}. Name the interface that "
                f"connects the machines in {GLOO} and {NCCL} on each of them (here: "
                f"{', '.join(map(str, interfaces()))}), and check that no firewall blocks them."
            )


def _connect(address: str, port: int) -> str:
    """The reason why the connection fails; empty if it succeeds."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError as error:
        return str(error.strerror or error)
    return ""


def _wait_until(done: Callable[[], bool], deadline: float) -> None:
    while not done() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def by_machine(members: Sequence[Member]) -> str:
    """``ranks 0-7 on node0 (10.0.0.1), ranks 8-15 on node1 (10.0.0.2)``."""
    machines: dict[tuple[str, ...], list[int]] = {}
    for member in members:
        machines.setdefault(tuple(member.machine), []).append(member.rank)
    return ", ".join(f"{rank_ranges(ranks)} on {host} ({address})" for (host, address), ranks in machines.items())
