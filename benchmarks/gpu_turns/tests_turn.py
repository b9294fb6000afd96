"""Runs one file of tests/gpu with pytest; ``gpu_turns.outcomes`` appends a row as each test ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from certificate import REPOSITORY


def run(spec: dict[str, Any]) -> None:
    """Run the tests of ``spec["file"]`` that have no outcome yet; the output goes to ``spec["log"]``.

    Raises:
        RuntimeError: pytest ended without running the tests.
    """
    command = [sys.executable, "-m", "pytest", spec["file"], "-q", "-p", "no:cacheprovider", "-p", "gpu_turns.outcomes"]
    paths = [str(REPOSITORY / "benchmarks"), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with Path(spec["log"]).open("a") as log:
        done = subprocess.run(command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, env=environment)
    if done.returncode not in (0, 1, 5):  # 5: every test has an outcome
        raise RuntimeError(f"pytest {spec['file']} ended with code {done.returncode}; see {spec['log']}")
