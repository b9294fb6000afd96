"""The file that names the newest checkpoint of a folder, as in Megatron-LM, and its record."""

from __future__ import annotations

from pathlib import Path

from isthmus.errors import DataError
from isthmus.files.input_files import read_json

TRACKER = "latest_checkpointed_iteration.txt"
"""Contains the step of the newest checkpoint."""
RECORD = "latest_checkpointed_iteration.json"
"""Repeats the step in the tracker file, a plain number in which a damaged digit is another step."""


def check_tracker(root: Path, step: int) -> None:
    """Raise DataError if the tracker file of ``root``, which names ``step``, does not agree with its record.

    Checkpoints of other programs have no record.
    """
    tracker, record = root / TRACKER, root / RECORD
    if not record.is_file():
        return
    try:
        allowed = read_json(record)["steps"]
        agrees = step in allowed
    except (DataError, KeyError, TypeError):
        allowed, agrees = "nothing that can be read", False
    if not agrees:
        raise DataError(
            f"{tracker} names step {step}, and {record.name} beside it {allowed}: one of them is damaged, or was "
            f"edited. Give the checkpoint itself, for example {root}/iter_{step:07d} (of a run to resume, with "
            f"checkpoint.resume=); or delete {record.name} if the tracker is right."
        )
