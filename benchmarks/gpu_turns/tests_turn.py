"""Runs one file of tests/gpu with pytest; ``gpu_turns.outcomes`` appends a row as each test ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from certificate import REPOSITORY


def run(spec: dict[str, Any]) -> None:
    """Run the tests of ``spec["file"]`` that have no outcome yet; the output goes to ``spec["log"]``.

    Raises:
        RuntimeError: pytest ended without running the tests.
    """
    run_pytest([spec["file"]], Path(spec["log"]))


def run_pytest(
    arguments: Sequence[str], log: Path, *, wrapper: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> None:
    """Run pytest, as the program of ``wrapper``, with more environment ``variables``; its output is added to ``log``.

    Raises:
        RuntimeError: it ended without running the tests.
    """
    plugins = ["-p", "no:cacheprovider", "-p", "gpu_turns.outcomes"]
    command = [*wrapper, sys.executable, "-m", "pytest", *arguments, "-q", *plugins]
    paths = [str(REPOSITORY / "benchmarks"), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | (variables or {})
    with log.open("a") as file:
        done = subprocess.run(command, cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT, env=environment)
    if done.returncode not in (0, 1, 5):  # 5: every test has an outcome
        raise RuntimeError(f"pytest {' '.join(arguments)} ended with code {done.returncode}; see {log}")
