"""The run folder of a command without ``--out``: ``runs/<recipe>-<model>-<n>``, new for each start."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.errors import UsageError

RUNS = "runs"
_VARIABLE = "ISTHMUS_DEFAULT_OUT"
"""Environment variable with the folder that the command has chosen, for its ranks."""


def default_out(settings: Mapping[str, Any], *, is_rank: bool) -> str:
    """The folder with the next free number; all ranks of ``--nproc`` get that of the command which starts them.

    Args:
        settings: of the run, not validated yet.
        is_rank: whether another program has started this rank.
    """
    if (chosen := os.environ.get(_VARIABLE)) is not None:
        return chosen
    if is_rank:
        raise UsageError(
            "the ranks that torchrun or Slurm starts need one run folder, from which a restart resumes. Name it with "
            "--out."
        )
    prefix = f"{settings.get('recipe')}-{_model_name(settings.get('model'))}"
    pattern = re.compile(rf"{re.escape(prefix)}-(\d+)(-rehearsal)?")
    names = os.listdir(RUNS) if os.path.isdir(RUNS) else []
    numbers = [int(match[1]) for name in names if (match := pattern.fullmatch(name))]
    return os.path.join(RUNS, f"{prefix}-{max(numbers, default=0) + 1}")


def hand_to_ranks(out: str | None) -> None:
    """Let the ranks that this process starts use the folder; None: they have ``--out``."""
    if out is not None:
        os.environ[_VARIABLE] = out


def naming_folder(message: str, out: str) -> str:
    """The message of a run that can be resumed: without ``--out`` the same command would start another run."""
    return re.sub(r"(?i)\b(the same command( again)?)\b", rf"\1 with --out {out}", message)


def _model_name(model: Any) -> str:
    section = {"path": model} if isinstance(model, str) else model if isinstance(model, dict) else {}
    config = section.get("config")
    model_type = config.get("model_type") if isinstance(config, dict) else None
    path = Path(str(section.get("path") or model_type or "model").removeprefix("preset:"))
    name = path.parent.name if path.name in ("hf", "adapter") and path.parent.name else path.name
    return re.sub(r"[^\w.-]+", "-", name.removesuffix(".yaml").removesuffix(".yml")) or "model"
