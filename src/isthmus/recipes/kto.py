"""Kahneman-Tversky optimization on answers with labels."""

from __future__ import annotations

from isthmus.config.schema import RunConfig
from isthmus.recipes.run import RunResult, run_recipe


def run(config: RunConfig) -> RunResult:
    """Train on answers with labels and export the model; call it on every rank.

    Raises:
        Preempted: the run was stopped by a signal; its state is saved.
        IsthmusError: any other failure, with its exit code.
    """
    return run_recipe("kto", config)
