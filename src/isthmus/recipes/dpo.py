"""Direct preference optimization on pairs of a chosen and a rejected answer."""

from __future__ import annotations

from isthmus.config.schema import RunConfig
from isthmus.recipes.run import RunResult
from isthmus.recipes.run import run as run_recipe


def run(config: RunConfig) -> RunResult:
    """Train on preferences as ``config`` says; see :func:`isthmus.recipes.run.run` for the errors."""
    return run_recipe("dpo", config)
