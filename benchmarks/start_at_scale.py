"""Start, heartbeat and failure of up to 16,384 ranks: the requests and bytes that reach the rendezvous store.

64 processes act as 2,048 machines of 8 ranks. They run the code of the ranks against a real TCPStore: every rank
connects and opens the folder of its machine, every agent registers its members and passes heartbeats and failures on.
Left out is what never leaves a machine: the other ranks of a machine only write their files. An agent has no thread:
its process calls it for one machine after the other. Requests are those of the client (a `get` is two, since it waits
first), bytes those of keys and values. Without `::ffff:127.0.0.1` in /etc/hosts, torch asks a name server for the host
name of each connection.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import secrets
import socket
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from certificate import certificate, publish_result

LOCAL = 8
"""Ranks of a machine."""
PROCESSES = 64
PORT_S = 600.0
SCENARIOS = ("killed rank", "lost machine", "no answer")
VICTIM_SHARE = 0.6
"""Where the lost rank is among the machines."""


class CountingStore:
    """A store that counts the requests and the bytes of keys and values, to and from the server."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts

    def _count(self, requests: int, sent: int, received: int) -> None:
        self._counts.update(requests=requests, bytes_to_store=sent, bytes_from_store=received)

    def set(self, key: str, value: str) -> None:
        self._count(1, len(key) + len(value), 0)
        self._store.set(key, value)

    def append(self, key: str, value: str) -> None:
        self._count(1, len(key) + len(value), 0)
        self._store.append(key, value)

    def add(self, key: str, number: int) -> int:
        self._count(1, len(key) + 8, 8)
        return int(self._store.add(key, number))

    def check(self, keys: list[str]) -> bool:
        self._count(1, sum(map(len, keys)), 8)
        return bool(self._store.check(keys))

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        self._count(2, 2 * len(key), len(value))
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._store.multi_get(keys)
        self._count(2, 2 * sum(map(len, keys)), sum(map(len, values)))
        return values

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        value: bytes = self._store.compare_set(key, expected, desired)
        self._count(1, len(key) + len(expected) + len(desired), len(value))
        return value

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._store.wait(keys, timeout)
        self._count(1, sum(map(len, keys)), 8)


@dataclass
class VirtualMachine:
    index: int
    folder: Any
    folders: list[Any]
    heartbeat: Any
    store: CountingStore
    lost: bool = False
    named_s: float | None = None
    message: str = ""

    def relay(self) -> None:
        """Do what the thread of the agent does, and note when the failure arrives."""
        if not self.lost:
            self.heartbeat._agent.relay()
        if self.named_s is None and (failure := self.folder.failure()) is not None:
            self.named_s, self.message = time.time(), failure.message


class Machines:
    """The machines of one process."""

    def __init__(self, indices: list[int], world_size: int, scratch: str, pipe: Connection) -> None:
        self.indices, self.world_size, self.scratch, self.pipe = indices, world_size, scratch, pipe
        self.counts: Counter[str] = Counter()
        self.machines: list[VirtualMachine] = []

    def connect(self) -> None:
        """All ranks connect to the store and open the folder of their machine."""
        from isthmus.launch import heartbeat, machine_folder

        open_store = heartbeat.open_store
        heartbeat.open_store = lambda *args, **options: CountingStore(open_store(*args, **options), self.counts)  # type: ignore[assignment,return-value]
        heartbeat._leave = lambda failure: None  # type: ignore[assignment,return-value]
        tempfile.tempdir = self.scratch
        for index in self.indices:
            machine_folder.this_machine = lambda index=index: [f"node{index:04}", self._address(index)]  # type: ignore[assignment]
            folders, stores = [], []
            for rank in range(index * LOCAL, (index + 1) * LOCAL):
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % LOCAL))
                stores.append(heartbeat.open_store(PORT_S, serves=False))
                folders.append(machine_folder.open_machine_folder(stores[-1]))
            os.environ["RANK"] = str(index * LOCAL)
            heart = heartbeat.Heartbeat(600.0, folders[0])
            self.machines.append(VirtualMachine(index, folders[0], folders, heart, stores[0]))
            self._stores = stores  # connected as long as the run

    def _address(self, index: int) -> str:
        return f"10.{index // 250}.{index % 250}.1"

    def register(self) -> None:
        """Register all ranks, and wait for those of all machines."""
        from threading import Thread

        from isthmus.launch import rendezvous

        done: list[tuple[VirtualMachine, Any]] = []

        def register(machine: VirtualMachine) -> None:
            members = []
            for folder in machine.folders:
                listeners = [
                    ("interface eth0, the route to rank 0", self._address(machine.index), 40000 + folder.rank % LOCAL)
                ]
                member = rendezvous.Member(
                    rank=folder.rank, world_size=self.world_size, listeners=listeners, agent=folder.agent,
                    machine=[f"node{machine.index:04}", self._address(machine.index)],
                    device=f"GPU-{secrets.token_hex(16)}, PCI {folder.rank % LOCAL}",
                )  # fmt: skip
                members.append(member)
                folder.write(f"member-{folder.rank}", json.dumps(asdict(member)))
            deadline = time.monotonic() + PORT_S
            result, _ = rendezvous._register(machine.store, machine.folder, members[0], deadline, PORT_S)  # type: ignore[arg-type]
            machine.heartbeat._watched = result.ranks[1:]
            for folder in machine.folders:
                folder.beat("step 12: forward and backward")
                folder.write(f"connected-{folder.rank}")
            machine.heartbeat._agent.machine = result
            machine.store.wait([rendezvous.ALL_CONNECTED], timedelta(seconds=PORT_S))
            done.append((machine, result))

        threads = [Thread(target=register, args=(machine,)) for machine in self.machines]
        for thread in threads:
            thread.start()
        while len(done) < len(self.machines):
            self._pass(0.1)
        for thread in threads:
            thread.join()

    def _pass(self, period_s: float = 0.34) -> None:
        started_s = time.monotonic()
        for machine in self.machines:
            machine.relay()
        time.sleep(max(0.0, period_s - (time.monotonic() - started_s)))

    def steady(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._pass()

    def hang(self, victim: int) -> None:
        """Let all ranks wait for one."""
        for machine in self.machines:
            for folder in machine.folders:
                odd = machine.index == victim and folder is machine.folders[5]
                folder.beat("step 12: data" if odd else "step 12: forward and backward")

    def fail(self, scenario: str, victim: int) -> None:
        """Let the failure happen here, if it happens on a machine of this process."""
        from isthmus.errors import Hang
        from isthmus.launch.first_failure import Failure
        from isthmus.launch.machine_agent import RANKS
        from isthmus.launch.machine_folder import LEAVING

        for machine in self.machines:
            if scenario == "no answer":  # as every rank after the limit of a collective that one rank does not join
                for folder in machine.folders:
                    text = f"rank {folder.rank} waited for another rank and got no answer. The ranks: {RANKS}."
                    failure = Failure(rank=folder.rank, exit_code=Hang.exit_code, message=text, machine=["", ""])
                    folder.write(f"posted-{folder.rank}", json.dumps(asdict(failure)))
            elif machine.index == victim and scenario == "killed rank":
                os.environ["RANK"] = str(machine.folder.rank)
                machine.heartbeat.__enter__()
                machine.heartbeat.start(machine.heartbeat._agent.machine)
                machine.folders[5]._unlock()  # as the kernel does it
            elif machine.index == victim:
                machine.lost = True
            elif scenario == "lost machine" and machine.index == 0:  # a collective with the lost machine has failed
                machine.folders[3].beat(f"step 12: forward and backward: {LEAVING}")

    def until_named(self, seconds: float) -> list[tuple[float, str]]:
        """When each machine has the failure, and what it says."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and any(m.named_s is None and not m.lost for m in self.machines):
            self._pass()
        return [(machine.named_s or math.inf, machine.message) for machine in self.machines if not machine.lost]

    def serve(self) -> None:
        """Answer the requests of the main process, up to an empty one."""
        while request := self.pipe.recv():
            name, *arguments = request
            self.counts.clear()
            result = getattr(self, name)(*arguments)
            self.pipe.send((result, dict(self.counts)))


def host(pipe: Connection, environment: dict[str, str]) -> None:
    from isthmus.launch import heartbeat

    os.environ.update(environment)
    store = heartbeat.open_store(PORT_S, serves=True)
    pipe.send(store is not None)
    pipe.recv()


def work(indices: list[int], environment: dict[str, str], scratch: str, pipe: Connection) -> None:
    os.environ.update(environment)
    Machines(indices, int(environment["WORLD_SIZE"]), scratch, pipe).serve()
    os._exit(0)


class Cluster:
    """The processes of a run of ``ranks`` ranks."""

    def __init__(self, ranks: int, scratch: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.machines = ranks // LOCAL
        environment = {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(LOCAL)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        targets: list[tuple[Any, tuple[Any, ...]]] = [(host, (environment,))]
        count = min(PROCESSES, self.machines)
        indices = [list(range(number, self.machines, count)) for number in range(count)]
        targets += [(work, (part, environment | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, scratch)) for part in indices]
        for target, arguments in targets:
            here, there = context.Pipe()
            ordered = (there, *arguments) if target is host else (*arguments, there)
            process = context.Process(target=target, args=ordered, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
            if target is host:
                here.recv()

    def call(self, name: str, *arguments: Any) -> tuple[float, Counter[str], list[Any]]:
        """Call a method of :class:`Machines` in all processes; returns seconds, counts and results."""
        started_s, counts, results = time.time(), Counter[str](), []
        pipes = self._pipes[1:]
        for pipe in pipes:
            pipe.send((name, *arguments))
        while pipes:
            for pipe in wait(pipes):
                result, counted = pipe.recv()  # type: ignore[union-attr]
                pipes.remove(pipe)  # type: ignore[arg-type]
                counts.update(counted)
                results.append(result)
        return time.time() - started_s, counts, results

    def close(self) -> None:
        for pipe, process in reversed(list(zip(self._pipes, self._processes, strict=True))):
            with suppress(OSError):  # it failed
                pipe.send(())
            process.join(60)
            process.kill()


def measure(ranks: int, scenario: str, steady_s: float, scratch: str) -> dict[str, Any]:
    cluster = Cluster(ranks, scratch)
    try:
        connect_s, connected, _ = cluster.call("connect")
        start_s, started, _ = cluster.call("register")
        _, beats, _ = cluster.call("steady", steady_s)
        victim = int(cluster.machines * VICTIM_SHARE)
        cluster.call("hang", victim)
        cluster.call("steady", 5.0)
        failed_s = time.time()
        cluster.call("fail", scenario, victim)
        _, ended, results = cluster.call("until_named", 60.0)
    finally:
        cluster.close()
    named = [item for part in results for item in part]
    lost = f"rank {victim * LOCAL + 5} on "
    result = {
        "ranks": ranks, "machines": cluster.machines, "scenario": scenario,
        "connect": dict(connected) | {"seconds": connect_s},
        "start": dict(started) | {"seconds": start_s},
        "heartbeats": {f"{name}_per_s": value / steady_s for name, value in beats.items()},
        "failure": dict(ended) | {
            "seconds_to_last_machine": max(when for when, _ in named) - failed_s,
            "machines_that_name_it": sum(lost in message for _, message in named),
            "message": named[0][1][:300],
        },
    }  # fmt: skip
    print(f"{ranks:6} ranks  {scenario:12}  connect {connect_s:5.1f} s, start {start_s:6.1f} s, "
          f"{started['requests']:7} requests, "
          f"{started['bytes_from_store']:9} bytes from the store;  {beats['requests'] / steady_s:7.0f} requests/s;  "
          f"failure: {result['failure']['seconds_to_last_machine']:5.1f} s, {ended['requests']:6} requests, named on "
          f"{result['failure']['machines_that_name_it']} of {cluster.machines}", flush=True)  # fmt: skip
    return result


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="64,512,4096,16384", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--only", choices=SCENARIOS, help="one kind of failure")
    parser.add_argument("--steady", type=float, default=20.0, help="seconds of heartbeats (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="only check that the benchmark runs")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the server may not find the host names of its clients
    import isthmus.launch.rendezvous  # noqa: F401  (before the processes fork)

    sizes = [32] if chosen.quick else [int(number) for number in chosen.ranks.split(",")]
    results = []
    memory = Path("/dev/shm")
    for ranks in sizes:
        for scenario in [chosen.only] if chosen.only else SCENARIOS:
            with tempfile.TemporaryDirectory(
                prefix="isthmus-scale-", dir=memory if memory.is_dir() else None
            ) as scratch:
                results.append(measure(ranks, scenario, 2.0 if chosen.quick else chosen.steady, scratch))
    result = {"certificate": certificate([sys.argv[0], *arguments]), "ranks_per_machine": LOCAL, "sizes": results}
    publish_result("start-at-scale", result, record=chosen.record, out=chosen.out)


if __name__ == "__main__":
    main(sys.argv[1:])
