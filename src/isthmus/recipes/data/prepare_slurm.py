"""The jobs of ``isthmus prepare --engine slurm-array``: an array whose tasks make the parts, and a job that merges.

Each task runs the same command for every N-th shard. The job after them, which starts however they ended, runs it for
all shards: it makes the parts that are missing and merges all.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.errors import IOFailure, UsageError
from isthmus.files.remote_files import is_url

_DEFAULT_WORKERS = 4


@dataclass(frozen=True, slots=True)
class ArrayJobs:
    """Scripts for ``sbatch``."""

    parts: str
    merge: str

    def submit(self) -> tuple[str, str]:
        """Job ids of the array and of the merge, which waits for it."""
        parts = _sbatch(self.parts)
        return parts, _sbatch(self.merge, f"--dependency=afterany:{parts}")


def array_jobs(arguments: Sequence[str], out: str, *, tasks: int, workers: int | None) -> ArrayJobs:
    """The jobs for the ``arguments`` of ``isthmus prepare`` without ``--engine``, ``--tasks`` and ``--workers``."""
    workers = workers or _DEFAULT_WORKERS
    logs = "isthmus-prepare" if is_url(out) else f"{out}.slurm"
    command = shlex.join([sys.executable, "-m", "isthmus", "prepare", *arguments, "--workers", str(workers)])
    shared = ["--job-name=isthmus-prepare", "--nodes=1", "--ntasks=1", f"--cpus-per-task={workers}", "--requeue"]
    part = f"{command} --part $SLURM_ARRAY_TASK_ID/{tasks}"
    return ArrayJobs(
        _script([*shared, f"--array=0-{tasks - 1}", f"--output={logs}-%A_%a.log"], part),
        _script([*shared, f"--output={logs}-merge-%j.log"], command),
    )


def _script(options: Sequence[str], command: str) -> str:
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), f"exec {command}", ""])


def _sbatch(script: str, *options: str) -> str:
    try:
        done = subprocess.run(["sbatch", "--parsable", *options], input=script, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UsageError(
            "--engine slurm-array needs sbatch, which is not installed here. Run the command where jobs are "
            "submitted, or print the scripts with --dry-run."
        ) from error
    if done.returncode:
        raise IOFailure(f"sbatch refused the job: {' '.join(done.stderr.split()) or done.returncode}.")
    return done.stdout.strip().partition(";")[0]
