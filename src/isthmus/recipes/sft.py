"""Supervised fine-tuning on chats, with loss on the assistant's messages."""

from __future__ import annotations

from isthmus.config.schema import RunConfig
from isthmus.recipes.run import RunResult
from isthmus.recipes.run import run as run_recipe


def run(config: RunConfig) -> RunResult:
    """Fine-tune as ``config`` says; see :func:`isthmus.recipes.run.run` for the errors."""
    return run_recipe("sft", config)
