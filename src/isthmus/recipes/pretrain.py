"""Pretraining on documents, from random or given weights."""

from __future__ import annotations

from isthmus.config.schema import RunConfig
from isthmus.recipes.run import RunResult, run_recipe


def run(config: RunConfig) -> RunResult:
    """Pretrain on text and export the model; call it on every rank.

    Raises:
        Preempted: the run was stopped by a signal; its state is saved.
        IsthmusError: any other failure, with its exit code.
    """
    return run_recipe("pretrain", config)
