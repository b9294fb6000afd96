"""Pretraining on documents, from random or given weights, with loss on every token."""

from __future__ import annotations

from isthmus.config.schema import RunConfig
from isthmus.recipes.run import RunResult
from isthmus.recipes.run import run as run_recipe


def run(config: RunConfig) -> RunResult:
    """Pretrain as ``config`` says; see :func:`isthmus.recipes.run.run` for the errors."""
    return run_recipe("pretrain", config)
