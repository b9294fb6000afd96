"""Runs the command line in a real process and returns its exit code, stdout and stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "ISTHMUS_STOP_FILE")


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    """The exit code and streams of a finished command."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        """Error messages printed to stderr."""
        return [line for line in self.stderr.splitlines() if line.startswith("isthmus:")]

    def error(self, code: int) -> str:
        """Check the exit code and return the only error message; tracebacks and warnings are not allowed."""
        assert self.returncode == code, self
        errors = [line for line in self.errors if not line.startswith("isthmus: SIG")]  # the answer to a signal
        assert len(errors) == 1 and not self.stdout, self
        for text in ("Traceback", "Warning", "elastic", "[rank", "W1", "E1"):
            assert text not in self.stderr, self
        return errors[0]

    @property
    def result(self) -> dict[str, Any]:
        """The parsed output of ``--json``."""
        assert self.returncode == 0, self
        return dict(json.loads(self.stdout))


def environment() -> dict[str, str]:
    """Environment without rank variables, with one thread per rank."""
    clean = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    return clean | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def start(*args: str, cwd: Path, **variables: str) -> subprocess.Popen[str]:
    """Start the command in a new interpreter; ``variables`` are added to its environment."""
    return subprocess.Popen(
        [sys.executable, "-m", "isthmus", *args],
        cwd=cwd, env=environment() | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finished(process: subprocess.Popen[str], timeout_s: float = 120.0) -> CompletedCommand:
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"still running after {timeout_s} s: {process.communicate()}") from None
    return CompletedCommand(process.returncode, out, err)


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and modification time in ns of every file and folder below ``folder``."""
    values = {}
    for path in sorted(folder.rglob("*")):
        stat = path.lstat()
        values[str(path.relative_to(folder))] = (0, 0) if path.is_dir() else (stat.st_size, stat.st_mtime_ns)
    return values


def rows(run_folder: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The objects of a file of rows, without their checksums."""
    results = [json.loads(line) for line in (run_folder / file).read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "checksum"} for row in results]


def wait_for_step(out: Path, step: int) -> None:
    while not (out / "metrics.jsonl").exists() or all(row.get("step", 0) < step for row in rows(out)):
        time.sleep(0.05)
