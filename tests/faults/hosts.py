"""Environment variables of ranks, two hosts as network namespaces, and faults injected into a rank."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ADDRESSES = ("10.213.0.1", "10.213.0.2")
DEAD_ADDRESSES = ("192.0.2.1", "192.0.2.2")
"""Addresses of an interface without a route to the other host."""


def rank_variables(size: int, *, address: str = "127.0.0.1") -> list[dict[str, str]]:
    """The environment variables of each of ``size`` ranks on one machine, with a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": port}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Create two network namespaces connected by ``wire0``; each also has an unconnected interface ``dead0``.

    Raises:
        PermissionError: the process lacks the permission; the message has the reason.
    """
    if shutil.which("ip") is None:
        raise PermissionError("command `ip` not found: install iproute2")
    names = (f"isthmus-a-{os.getpid()}", f"isthmus-b-{os.getpid()}")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("-n", names[0], "link", "add", "wire0", "type", "veth", "peer", "name", "wire0", "netns", names[1])
        for name, address, dead in zip(names, ADDRESSES, DEAD_ADDRESSES, strict=True):
            _ip("-n", name, "link", "add", "dead0", "type", "veth", "peer", "name", "dead1")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "wire0")
            _ip("-n", name, "address", "add", f"{dead}/32", "dev", "dead0")
            for link in ("lo", "wire0", "dead0", "dead1"):
                _ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@contextmanager
def cut_wire(name: str) -> Iterator[None]:
    """Disconnect the network namespace ``name`` from the other one."""
    _ip("-n", name, "link", "set", "wire0", "down")
    try:
        yield
    finally:
        _ip("-n", name, "link", "set", "wire0", "up")


def _ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"ip {' '.join(args)}: {done.stderr.strip()}; run as root to test two hosts")


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
