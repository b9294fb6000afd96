"""Pretraining on documents, from random or given weights, with loss on every token."""

from __future__ import annotations

from isthmus.config.schema import RunConfig
from isthmus.recipes.run import RunResult
from isthmus.recipes.run import run as run_recipe


def run(config: RunConfig) -> RunResult:
    """Pretrain on text and export the model; every rank calls this function.

    Raises:
        Preempted: the run was asked to stop and has saved its state.
        IsthmusError: any other failure, with its exit code.
    """
    return run_recipe("pretrain", config)
