"""Runs the command line as its user does and keeps what it left: exit code, streams, files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "ISTHMUS_STOP_FILE")


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has run."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        """What the user is told of an error."""
        return [line for line in self.stderr.splitlines() if line.startswith("isthmus:")]

    def error(self, code: int) -> str:
        """The one line of a command that ended with ``code``; nothing else may look like an error."""
        assert self.returncode == code, self
        assert len(self.errors) == 1 and not self.stdout, self
        for word in ("Traceback", "Warning", "elastic", "[rank", "W1", "E1"):
            assert word not in self.stderr, self
        return self.errors[0]

    @property
    def result(self) -> dict[str, Any]:
        """What ``--json`` printed."""
        assert self.returncode == 0, self
        return dict(json.loads(self.stdout))


def environment() -> dict[str, str]:
    """That of a user's shell, with one thread a rank."""
    clean = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    return clean | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def start(*words: str, cwd: Path, **variables: str) -> subprocess.Popen[str]:
    """A real process, running, with ``variables`` in its environment."""
    return subprocess.Popen(
        [sys.executable, "-m", "isthmus", *words],
        cwd=cwd, env=environment() | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finished(process: subprocess.Popen[str], timeout_s: float = 120.0) -> Ended:
    """Wait for it."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"still running after {timeout_s} s: {process.communicate()}") from None
    return Ended(process.returncode, out, err)


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder below ``folder`` with its size and time of change in ns."""
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.lstat()
        found[str(path.relative_to(folder))] = (0, 0) if path.is_dir() else (stat.st_size, stat.st_mtime_ns)
    return found


def rows(run_folder: Path) -> list[dict[str, Any]]:
    """The objects of ``metrics.jsonl``."""
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
