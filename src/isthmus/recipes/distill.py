"""Distillation: a student learns the token probabilities of a teacher, on chats."""

from __future__ import annotations

from isthmus.config.schema import RunConfig
from isthmus.recipes.run import RunResult, run_recipe


def run(config: RunConfig) -> RunResult:
    """Train a student on chats with a frozen teacher and export it; call it on every rank.

    Raises:
        Preempted: the run was stopped by a signal; its state is saved.
        IsthmusError: any other failure, with its exit code.
    """
    return run_recipe("distill", config)
