"""Checks of cells before any is measured, and what their results depend on besides their settings."""

from __future__ import annotations

import functools
import multiprocessing
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import isthmus
from isthmus.config.schema import RunConfig
from isthmus.errors import explain

Environment = dict[str, str]
"""Versions, device, and environment variables that change speed, by name."""


def check_cells(runs: Sequence[tuple[RunConfig, int]]) -> Iterator[tuple[Environment, str | None]]:
    """Environment of each config with its number of ranks, and why its run would be refused, None if it is not.

    The checks are those of ``--dry-run``. They are made in another process, which gives back its GPU memory.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        for future in [pool.submit(_check, config, nproc) for config, nproc in runs]:
            try:
                yield future.result()
            except BrokenProcessPool:  # it was killed; the run tells why
                yield {}, None


def _check(config: RunConfig, nproc: int) -> tuple[Environment, str | None]:
    from isthmus.recipes.dry_run import dry_run

    environment: Environment = {}
    try:
        environment = _environment(config.platform)
        dry_run(config, world_size=nproc, ranks_here=nproc, report=lambda line: None)
    except Exception as error:
        return environment, explain(error)[1]
    return environment, None


@functools.cache
def _environment(chosen: str) -> Environment:
    import torch

    from isthmus.platforms.detect import detect
    from isthmus.recipes.plan.run_record import speed_variables, versions

    # Before detect sets those of the platform; the command line has set these two, by its options and the load.
    set_by_isthmus = ("TORCH_CPP_LOG_LEVEL", "OMP_WAIT_POLICY")
    variables = {name: value for name, value in speed_variables().items() if name not in set_by_isthmus}
    platform = detect(chosen)
    commit = git_commit(Path(isthmus.__file__).parents[2])
    return {
        **versions(),
        **({"commit": commit} if commit else {}),
        "platform": platform.name,
        "runtime": str(torch.version.hip or torch.version.cuda or "none"),
        "device": platform.describe(),
        **variables,
    }


def git_commit(folder: Path) -> str | None:
    """The commit of a checkout, with ``-dirty`` if its files differ; None for other folders."""
    if not (folder / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None
