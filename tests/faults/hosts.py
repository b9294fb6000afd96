"""Ranks as another launcher starts them, each a forked process with real exit code and streams; also on two hosts.

As a script it is the process that they are forked from, with all imports done: one JSON request a line, which names a
list of hosts, each the network namespace to enter and its ranks. Every host has a process that its ranks have for
parent, as a batch system's daemon is.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.command import Ended, environment

ADDRESSES = ("10.213.0.1", "10.213.0.2")
DEAD_ADDRESSES = ("192.0.2.1", "192.0.2.2")
"""On an interface that leads nowhere."""


class Ranks:
    """Ranks that run."""

    def __init__(self, process: subprocess.Popen[str], files: list[Path]) -> None:
        self._process = process
        self._files = files
        self.pids: list[int] = self._read()

    def _read(self) -> Any:
        assert self._process.stdout
        return json.loads(self._process.stdout.readline())

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pids[rank], number)

    def ended(self) -> list[Ended]:
        """Wait for all of them."""
        codes = self._read()
        texts = [[file.with_suffix(end).read_text() for end in (".out", ".err")] for file in self._files]
        return [Ended(code, *text) for code, text in zip(codes, texts, strict=True)]


class Hosts:
    """Starts ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, hosts: list[list[tuple[list[str], dict[str, str]]]], namespaces: tuple[str, ...] = ()) -> Ranks:
        """Start ranks, given by host: the words after ``isthmus`` and the variables of each."""
        files, request = [], []
        for number, ranks in enumerate(hosts):
            host: dict[str, Any] = {"namespace": namespaces[number] if namespaces else None, "ranks": []}
            for words, variables in ranks:
                self._ranks += 1
                files.append(self._folder / f"rank-{self._ranks}")
                host["ranks"].append({"argv": words, "variables": variables, "file": str(files[-1])})
            request.append(host)
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Ranks(self._process, files)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


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


def _enter(namespace: str) -> None:
    """As `ip netns exec` does; os.setns is there from Python 3.12 on."""
    handle = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(handle, 0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "setns")


def _host(request: dict[str, Any], report: int) -> None:
    """Be the parent of one host's ranks: tell their pids, then how they ended."""
    if request["namespace"]:
        _enter(request["namespace"])
    pids = []
    for rank in request["ranks"]:
        pid = os.fork()
        if not pid:
            _rank(rank)
        pids.append(pid)
    os.write(report, json.dumps(pids).encode() + b"\n")
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os.write(report, json.dumps(codes).encode() + b"\n")
    os._exit(0)


def _rank(request: dict[str, Any]) -> None:
    code = 255
    try:
        for number, end in enumerate((None, ".out", ".err")):
            path = "/dev/null" if end is None else request["file"] + end
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
        os.environ.update(request["variables"])
        if "FAULT" in os.environ:
            _go_wrong(os.environ["FAULT"])
        from isthmus.cli.main import main as isthmus

        code = isthmus(request["argv"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _go_wrong(how: str) -> None:
    """At the third step: ``fail``, or ``sleep`` with everything else going on."""
    from isthmus.data.batching.batches import Batches

    step = Batches.step

    def broken(self: Batches, step_index: int) -> Any:
        if step_index == 2 and how == "sleep":
            time.sleep(1000)
        if step_index == 2:
            raise ZeroDivisionError("division by zero")
        return step(self, step_index)

    Batches.step = broken  # type: ignore[method-assign]


def main() -> None:
    import importlib

    names = (
        "recipes.sft",
        "recipes.pretrain",
        "engine.megatron_model",
        "engine.optim.optimizer",
        "engine.step",
        "engine.checkpoint.save_load",
    )
    for name in ("cli.main", "cli.process", *names):
        importlib.import_module(f"isthmus.{name}")
    gc.freeze()  # what was imported stays out of the collections of every command
    for line in sys.stdin:
        reports = []
        parents = []
        for request in json.loads(line):
            read, write = os.pipe()
            parent = os.fork()
            if not parent:
                _host(request, write)
            os.close(write)
            parents.append(parent)
            reports.append(os.fdopen(read))
        for _ in ("pids", "codes"):
            print(json.dumps([value for report in reports for value in json.loads(report.readline())]), flush=True)
        for parent, report in zip(parents, reports, strict=True):
            os.waitpid(parent, 0)
            report.close()


if __name__ == "__main__":
    main()
