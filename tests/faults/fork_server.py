"""Runs commands in processes forked from a shared server with all modules imported; exit codes and streams are real.

Run as a script, this file is the server: each line of stdin is a JSON request with a list of hosts, each with its
network namespace and its ranks. The fork of a pytest process prints the pids, then the exit codes. Each host has one
process that is the parent of its ranks, like the daemon of a batch system.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.command import CompletedCommand, environment
from faults.failing_calls import arm, library
from shared_server import SharedServer, serve

Rank = tuple[Sequence[str], dict[str, str]]
"""The arguments after ``isthmus``, and environment variables."""


class RunningRanks:
    """Handle of running ranks."""

    def __init__(self, server: SharedServer, files: list[Path]) -> None:
        self._server = server
        self._files = files
        self.pids: list[int] = server.receive(timeout_s=60.0)

    def _texts(self) -> list[list[str]]:
        return [[file.with_suffix(end).read_text() for end in (".out", ".err")] for file in self._files]

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pids[rank], number)

    def running(self, rank: int = 0) -> bool:
        try:
            return Path(f"/proc/{self.pids[rank]}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between open and read
            return False

    def wait(self, timeout_s: float = 120.0) -> list[CompletedCommand]:
        """Wait for all ranks; those that run longer are killed, so that the server can serve the next test."""
        try:
            codes = self._server.receive(timeout_s)
        except TimeoutError:
            running = [rank for rank in range(len(self.pids)) if self.running(rank)]
            for rank in running:
                with suppress(ProcessLookupError):
                    self.send(rank, signal.SIGKILL)
            codes = self._server.receive()
            text = f"ranks {running} were running after {timeout_s} s; exit codes {codes}, output {self._texts()}"
            raise AssertionError(text) from None
        return [CompletedCommand(code, *texts) for code, texts in zip(codes, self._texts(), strict=True)]

    def result(self) -> CompletedCommand:
        """Wait for the only rank."""
        (command,) = self.wait()
        return command


class ForkServer:
    """Client of the server; one request at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks = 0
        preloaded = {} if (built := library()) is None else {"LD_PRELOAD": str(built)}
        self._server = SharedServer(Path(__file__), environment() | preloaded, cwd=folder)

    def __call__(
        self, *args: str | Path, cwd: Path | None = None, largest_file_bytes: int | None = None
    ) -> CompletedCommand:
        """Run ``isthmus <args>`` and wait; ``largest_file_bytes`` sets RLIMIT_FSIZE."""
        return self.start(*args, cwd=cwd, largest_file_bytes=largest_file_bytes).result()

    def start(
        self, *args: str | Path, cwd: Path | None = None, largest_file_bytes: int | None = None, **variables: str
    ) -> RunningRanks:
        """Start ``isthmus <args>``; ``variables`` are added to its environment."""
        rank = ([str(arg) for arg in args], variables)
        return self.start_ranks([[rank]], cwd=cwd, largest_file_bytes=largest_file_bytes)

    def start_ranks(
        self,
        hosts: Sequence[Sequence[Rank]],
        namespaces: tuple[str, ...] = (),
        *,
        cwd: Path | None = None,
        largest_file_bytes: int | None = None,
    ) -> RunningRanks:
        """Start ranks, one list per host."""
        files, request = [], []
        for number, ranks in enumerate(hosts):
            host: dict[str, Any] = {"namespace": namespaces[number] if namespaces else None, "ranks": []}
            for args, variables in ranks:
                self._ranks += 1
                files.append(self._folder / f"rank-{self._ranks}")
                rank = {"argv": args, "variables": variables, "file": str(files[-1]), "cwd": str(cwd or self._folder)}
                host["ranks"].append(rank | {"largest_file_bytes": largest_file_bytes})
            request.append(host)
        self._server.send(request)
        return RunningRanks(self._server, files)

    def close(self) -> None:
        self._server.close()


def _enter(namespace: str) -> None:
    """Enter a network namespace like `ip netns exec`; os.setns needs Python 3.12."""
    handle = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(handle, 0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "setns")


def _run_host(request: dict[str, Any], report: int) -> None:
    """Start the ranks of a host; write their pids, then their exit codes. Does not return."""
    if request["namespace"]:
        _enter(request["namespace"])
    pids = []
    for rank in request["ranks"]:
        pid = os.fork()
        if not pid:
            os.close(report)
            _run_rank(rank)
        pids.append(pid)
    os.write(report, json.dumps(pids).encode() + b"\n")
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os.write(report, json.dumps(codes).encode() + b"\n")
    os._exit(0)


def _run_rank(request: dict[str, Any]) -> None:
    """Run the command in this process. Does not return."""
    code = 255
    try:
        os.chdir(request["cwd"])
        # Replace the inherited stdin, stdout and stderr.
        for number, end in enumerate((None, ".out", ".err")):
            path = "/dev/null" if end is None else request["file"] + end
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), number)
        if request["largest_file_bytes"]:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the default of Python; write() then fails with EFBIG
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["largest_file_bytes"],) * 2)
        os.environ.update(request["variables"])
        tempfile.tempdir = None  # TMPDIR may be one of them
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
        if "FAILING_CALLS" in os.environ:
            arm()
        if fault := os.environ.get("FAULT"):
            from faults.hosts import inject

            inject(fault)
        if kill_point := os.environ.get("KILL_POINT"):
            from faults.kill_points import arm as arm_kill

            point, number, destination = json.loads(kill_point)
            arm_kill(point, number, Path(destination))
        from isthmus.cli.main import main as isthmus

        code = isthmus(request["argv"])
    except SystemExit as exit_request:
        code = exit_request.code if isinstance(exit_request.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    gc.disable()  # imports leave no garbage: a sixth of their time
    for name in (
        "isthmus.cli.main",
        "isthmus.cli.process",
        "isthmus.convert.transfer",
        "isthmus.recipes.run",
        "isthmus.engine.decoder.decoder",
        "isthmus.engine.optim.optimizer",
        "isthmus.engine.step",
        "isthmus.engine.checkpoint.save_load",
        "isthmus.launch.local_launcher",
    ):
        importlib.import_module(name)
    for name in ("torch.distributed.launcher.api", "torch._dynamo"):  # optimizers import the latter
        importlib.import_module(name)
    importlib.import_module("isthmus.families.registry").all_families()  # imports them
    gc.freeze()  # garbage collection in the commands skips imported objects
    gc.enable()
    serve()
    for line in sys.stdin:
        reports, hosts = [], []
        for request in json.loads(line):
            read, write = os.pipe()
            if not (host := os.fork()):
                _run_host(request, write)
            os.close(write)
            hosts.append(host)
            reports.append(os.fdopen(read))
        for _ in ("pids", "codes"):
            print(json.dumps([value for report in reports for value in json.loads(report.readline())]), flush=True)
        for host, report in zip(hosts, reports, strict=True):
            os.waitpid(host, 0)
            report.close()


if __name__ == "__main__":
    main()
