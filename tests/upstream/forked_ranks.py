"""Runs a file of Megatron-LM's unit tests in forked processes, one for each rank."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from free_port import free_port
from isthmus.launch.local_launcher import exit_with_parent
from upstream.cpu_plugin import Outcomes

_DISAGREEMENT_S = 20
"""A rank failed a test and another is still in it: after this time it waits for the first."""
_ORDER = ("passed", "skipped", "failed")


@dataclass
class TestFile:
    """``log`` is a path whose suffix is replaced for the files of each rank."""

    __test__ = False

    path: Path
    checkout: Path
    log: Path
    ranks: int
    limit_s: float

    def run(self, selected: frozenset[str], end: float) -> list[dict[str, Any]]:
        """Outcomes of the selected tests, or of all; tests that are left when ``end`` comes are not run.

        Processes that end or hang in a test are started again for the tests after it.
        """
        outcomes: dict[str, dict[str, Any]] = {}
        while True:
            finished = self._run_once(selected, frozenset(outcomes), end)
            lines = [self._read(rank) for rank in range(self.ranks)]
            new = merge(lines)
            outcomes |= new
            if finished or not new or time.monotonic() > end:
                break
        missing = {name for line in lines[0] for name in line.get("collected", ())} - outcomes.keys()
        reason = "the time limit of the file"
        if not outcomes and not missing and not finished:
            missing, reason = {self.path.name}, self._file(0, ".log").read_text()[-600:]
        outcomes |= {name: {"test": name, "outcome": "not run", "reason": reason} for name in missing}
        return list(outcomes.values())

    def _file(self, rank: int, suffix: str) -> Path:
        return self.log.with_suffix(f".{rank}{suffix}")

    def _read(self, rank: int) -> list[dict[str, Any]]:
        file = self._file(rank, ".jsonl")
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def _run_once(self, selected: frozenset[str], done: frozenset[str], end: float) -> bool:
        port = free_port()
        for rank in range(self.ranks):
            self._file(rank, ".jsonl").unlink(missing_ok=True)
        return self._wait([self._fork(rank, port, selected, done) for rank in range(self.ranks)], end)

    def _fork(self, rank: int, port: int, selected: frozenset[str], done: frozenset[str]) -> int:
        if child := os.fork():
            return child
        status = 70
        try:
            os.setsid()
            exit_with_parent()
            work = self._file(rank, ".work")
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            os.chdir(work)
            output = os.open(self._file(rank, ".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.ranks)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", "-o", "addopts=", "--tb=short"]
            options += ["--rootdir", str(self.checkout), "-c", str(self.checkout / "pyproject.toml")]
            plugin = Outcomes(self._file(rank, ".jsonl"), self.limit_s, selected, done)
            status = int(pytest.main([str(self.path), *options, "--basetemp", str(work / "tmp")], plugins=[plugin]))
            shutil.rmtree(work, ignore_errors=True)
        finally:
            sys.stdout.flush()
            os._exit(status)

    def _wait(self, children: list[int], end: float) -> bool:
        """False if a process hung, or ended within a test. With several ranks, a failure of one stops the others."""
        running, size, crashed = set(children), 0, False
        changed, disagreed = time.monotonic(), 0.0
        while running:
            time.sleep(0.05 if self.ranks == 1 else 0.3)
            now = time.monotonic()
            for child in list(running):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    running.remove(child)
                    crashed = crashed or os.WIFSIGNALED(status) or os.WEXITSTATUS(status) not in (0, 1, 2, 5)
            lines = [self._read(rank) for rank in range(self.ranks)]
            if size != (size := sum(map(len, lines))):
                changed = now
            disagreed = (disagreed or now) if _disagree(lines) else 0.0
            stuck = now > end or now - changed > self.limit_s + 60 or (disagreed and now - disagreed > _DISAGREEMENT_S)
            if running and (stuck or crashed):
                for child in running:
                    os.killpg(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                return False
        return not crashed


def _disagree(ranks: list[list[dict[str, Any]]]) -> bool:
    """One rank failed a test that another has not finished."""
    failed = {line["test"] for lines in ranks for line in lines if line.get("outcome") == "failed"}
    return any(failed - {line.get("test") for line in lines} for lines in ranks)


def merge(ranks: list[list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The worst outcome of the ranks; a test that began and has no outcome failed."""
    worst: dict[str, dict[str, Any]] = {}
    for line in (line for lines in ranks for line in lines if "test" in line):
        before = worst.get(line["test"], line)
        worst[line["test"]] = max(before, line, key=lambda entry: _ORDER.index(entry["outcome"]))
    for lines in ranks:
        unfinished = {line.get("begins") for line in lines} - {line.get("test") for line in lines} - {None}
        for name in unfinished:
            if worst.get(name, {}).get("outcome") != "failed":
                worst[name] = {"test": name, "outcome": "failed", "reason": "the process ended within the test"}
    return worst
