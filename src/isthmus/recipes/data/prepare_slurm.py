"""The jobs of ``isthmus prepare --engine slurm-array``: an array whose tasks make the parts, and a job that merges.

Each task runs the same command for every N-th shard. The job after them, which starts however they ended, runs it for
all shards: it makes the parts that are missing and merges all. With filters or deduplication, another array of the same
tasks reads the texts before, and a job between both arrays lists what is left out.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from isthmus.errors import IOFailure, UsageError
from isthmus.files.remote_files import is_url

LEFT_OUT: Literal["left-out"] = "left-out"
"""The part of the work between the two arrays: the lists of the texts that are left out."""
_DEFAULT_WORKERS = 4


@dataclass(frozen=True, slots=True)
class ArrayJobs:
    """Scripts for ``sbatch``; each job waits for the one before it."""

    scripts: tuple[str, ...]
    """The last two are the array that makes the parts, and the merge."""

    def submit(self) -> tuple[str, ...]:
        """The job ids."""
        jobs: list[str] = []
        for script in self.scripts:
            jobs.append(_sbatch(script, *([f"--dependency=afterany:{jobs[-1]}"] if jobs else [])))
        return tuple(jobs)

    def as_text(self) -> str:
        return "\n# sbatch --dependency=afterany:JOB_ID\n".join(self.scripts).rstrip()


def array_jobs(arguments: Sequence[str], out: str, *, tasks: int, workers: int | None, cleans: bool) -> ArrayJobs:
    """The jobs for the ``arguments`` of ``isthmus prepare`` without ``--engine``, ``--tasks`` and ``--workers``.

    ``cleans``: with filters or deduplication.
    """
    workers = workers or _DEFAULT_WORKERS
    logs = "isthmus-prepare" if is_url(out) else f"{out}.slurm"
    command = shlex.join([sys.executable, "-m", "isthmus", "prepare", *arguments, "--workers", str(workers)])
    shared = ["--job-name=isthmus-prepare", "--nodes=1", "--ntasks=1", f"--cpus-per-task={workers}", "--requeue"]
    part = f"{command} --part $SLURM_ARRAY_TASK_ID/{tasks}"
    array = _script([*shared, f"--array=0-{tasks - 1}", f"--output={logs}-%A_%a.log"], part)
    merge = _script([*shared, f"--output={logs}-merge-%j.log"], command)
    left_out = _script([*shared, f"--output={logs}-left-out-%j.log"], f"{command} --part {LEFT_OUT}")
    return ArrayJobs((array, left_out, array, merge) if cleans else (array, merge))


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
