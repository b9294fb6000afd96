"""What to evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSettings:
    model: str
    """Folder of a model, a checkpoint or a run, or an id on the Hub."""
    tasks: Sequence[str]
    num_fewshot: int | None = None
    limit: float | None = None
    """Number of examples of each task, or below 1 their share."""
    include_path: Sequence[Path] = ()
    """Folders with more tasks."""
    apply_chat_template: bool = False
    max_length: int | None = None
    """Longest text in tokens; None: the positions of the model."""
    batch_tokens: int = 8192
