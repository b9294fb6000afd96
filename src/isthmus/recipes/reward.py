"""Training of a reward model on pairs of a chosen and a rejected answer."""

from __future__ import annotations

from isthmus.config.schema import RunConfig
from isthmus.recipes.run import RunResult, run_recipe


def run(config: RunConfig) -> RunResult:
    """Train a reward model and export it; call it on every rank.

    Raises:
        Preempted: the run was stopped by a signal; its state is saved.
        IsthmusError: any other failure, with its exit code.
    """
    return run_recipe("reward", config)
