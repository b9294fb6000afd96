"""Environment variables of ranks, two hosts as network namespaces, and faults injected into a rank."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from free_port import free_port

ADDRESSES = tuple(f"10.213.0.{host}" for host in range(1, 5))
DEAD_ADDRESSES = ("192.0.2.1", "192.0.2.2")
"""Addresses of an interface without a route to the other host."""


def rank_variables(size: int, *, address: str = "127.0.0.1") -> list[dict[str, str]]:
    """The environment variables of each of ``size`` ranks on one machine, with a free port."""
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


_groups = count()


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two hosts with unconnected interfaces ``dead0``; raises as :func:`simulated_hosts`."""
    with simulated_hosts(2) as (first, second):
        for name, dead in zip((first, second), DEAD_ADDRESSES, strict=True):
            _ip("-n", name, "link", "add", "dead0", "type", "veth", "peer", "name", "dead1")
            _ip("-n", name, "address", "add", f"{dead}/32", "dev", "dead0")
            for link in ("dead0", "dead1"):
                _ip("-n", name, "link", "set", link, "up")
        yield first, second


@contextmanager
def simulated_hosts(number: int) -> Iterator[list[str]]:
    """Create network namespaces whose ``wire0`` have the first ``number`` of ``ADDRESSES``, connected by a bridge.

    Raises:
        PermissionError: the process lacks the permission; the message has the reason.
    """
    if shutil.which("ip") is None:
        raise PermissionError("command `ip` not found: install iproute2")
    group = f"isthmus-{os.getpid()}-{next(_groups)}"  # of several at the same time
    switch, *names = (f"{group}-{host}" for host in ("switch", *range(number)))
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for name, address in zip(names, ADDRESSES, strict=False):
            port = f"port{name.rpartition('-')[2]}"
            _ip("netns", "add", name)
            _ip("-n", name, "link", "add", "wire0", "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "wire0")
            for link in ("lo", "wire0"):
                _ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@contextmanager
def cut_wire(name: str) -> Iterator[None]:
    """Disconnect the network namespace ``name`` from the others."""
    _ip("-n", name, "link", "set", "wire0", "down")
    try:
        yield
    finally:
        _ip("-n", name, "link", "set", "wire0", "up")


@contextmanager
def swallowed(name: str, *addresses: str) -> Iterator[None]:
    """Discard what ``name`` sends to ``addresses``; connections stay open and no packet reports it."""
    for address in addresses:
        _ip("-n", name, "route", "add", "blackhole", f"{address}/32")
    try:
        yield
    finally:
        for address in addresses:
            _ip("-n", name, "route", "delete", "blackhole", f"{address}/32")


_PROXY = """
import asyncio, sys

port, target, delay_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])

async def pass_on(reader, writer):
    queue = asyncio.Queue()
    async def receive():
        while data := await reader.read(65536):
            queue.put_nowait((loop.time() + delay_s, data))
        queue.put_nowait((0.0, b""))
    receiving = loop.create_task(receive())
    while (item := await queue.get())[1]:
        await asyncio.sleep(max(0.0, item[0] - loop.time()))
        writer.write(item[1])
    writer.close()

async def connected(reader, writer):
    there = await asyncio.open_connection(target, port)
    await asyncio.gather(pass_on(reader, there[1]), pass_on(there[0], writer))

async def serve():
    global loop
    loop = asyncio.get_running_loop()
    server = await asyncio.start_server(connected, "0.0.0.0", port)
    print("ready", flush=True)
    await server.serve_forever()

asyncio.run(serve())
"""


@contextmanager
def slow_link(name: str, port: str, target: str, delay_s: float) -> Iterator[None]:
    """Pass connections to ``port`` of host ``name`` on to ``target``, each packet ``delay_s`` late."""
    command = ["ip", "netns", "exec", name, sys.executable, "-c", _PROXY, port, target, str(delay_s)]
    proxy = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert proxy.stdout is not None and proxy.stdout.readline() == b"ready\n"
        yield
    finally:
        proxy.kill()
        proxy.communicate()


def _ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"ip {' '.join(args)}: {done.stderr.strip()}; run as root to test several hosts")


class FakeHub:
    """Answers for the account ``me`` of the organization ``team``."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def _record(self, **call: Any) -> None:
        with open("hub.jsonl", "a") as file:
            file.write(json.dumps(call, default=str) + "\n")

    def whoami(self) -> dict[str, Any]:
        role = "read" if self._kind == "hub read-only" else "write"
        return {"name": "me", "orgs": [{"name": "team"}], "auth": {"accessToken": {"role": role}}}

    def create_repo(self, repo_id: str, **options: Any) -> str:
        self._record(create=repo_id, **options)
        return f"https://hub/{repo_id}"

    def upload_folder(self, *, folder_path: Path, **options: Any) -> None:
        self._record(upload=folder_path, files=sorted(path.name for path in Path(folder_path).iterdir()), **options)
        if self._kind == "hub broken":
            raise ConnectionError("the connection was lost")


def inject(fault: str) -> None:
    """Make the third step of this process raise an error (``fail``) or block (``sleep``), or suspend this process when
    it writes a checkpoint (``suspend in save``) or reads weights (``suspend in load``).

    ``hub``, ``hub read-only`` (its token) and ``hub broken`` (its uploads) are stand-ins for the Hub, which record
    calls in ``hub.jsonl``."""
    if fault.startswith("hub"):
        from isthmus.hf import hub

        hub.HfApi = partial(FakeHub, fault)  # type: ignore[misc,assignment]
        return
    if fault.startswith("suspend"):
        from isthmus.engine.checkpoint import checkpoint_writer
        from isthmus.recipes.model import rank_model

        def suspend(*_args: Any, **_kwargs: Any) -> None:
            time.sleep(1.5)  # a heartbeat reports the phase
            os.kill(os.getpid(), signal.SIGSTOP)

        module, name = (checkpoint_writer, "check_files") if fault.endswith("save") else (rank_model, "import_weights")
        setattr(module, name, suspend)
        return
    from isthmus.data.batching.batches import Batches

    step = Batches.step

    def broken(self: Batches, step_index: int) -> Any:
        if step_index == 2 and fault == "sleep":
            time.sleep(1000)
        if step_index == 2:
            raise ZeroDivisionError("division by zero")
        return step(self, step_index)

    Batches.step = broken  # type: ignore[method-assign]
