"""Variables of ranks that another launcher starts, two hosts on one machine, and faults to inject into a rank."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ADDRESSES = ("10.213.0.1", "10.213.0.2")
DEAD_ADDRESSES = ("192.0.2.1", "192.0.2.2")
"""On an interface that leads nowhere."""


def world(size: int, *, address: str = "127.0.0.1") -> list[dict[str, str]]:
    """The variables of each of ``size`` ranks on one machine, and a port that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": port}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a cable, ``wire0``; in each a ``dead0`` as well, which leads nowhere.

    Raises:
        PermissionError: this process may not make them; with the reason.
    """
    if shutil.which("ip") is None:
        raise PermissionError("there is no `ip` command: install iproute2")
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


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"ip {' '.join(words)}: {done.stderr.strip()}; run as root to test two hosts")


def inject(fault: str) -> None:
    """Break the third step of this process: ``fail``, or ``sleep``, while its other threads run."""
    from isthmus.data.batching.batches import Batches

    step = Batches.step

    def broken(self: Batches, step_index: int) -> Any:
        if step_index == 2 and fault == "sleep":
            time.sleep(1000)
        if step_index == 2:
            raise ZeroDivisionError("division by zero")
        return step(self, step_index)

    Batches.step = broken  # type: ignore[method-assign]
