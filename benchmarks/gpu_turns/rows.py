"""Rows that a process of a GPU benchmark appends to a file as soon as each of its measurements exists.

A process that is killed loses only the measurement at hand. Each row has a ``kind``: ``step``, ``profile``,
``measurement``, ``bandwidth``, ``check``, ``test``, ``fact``, ``absent`` or ``error``.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

ROWS = "ISTHMUS_BENCHMARK_ROWS"
"""Environment variable with the file."""
Row = dict[str, Any]


def append(kind: str, **values: Any) -> None:
    """Append a row, with the time since 1970."""
    with Path(os.environ[ROWS]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, "at_s": time.time(), **values}) + "\n")


def read(path: Path, *, since_s: float = 0.0) -> list[Row]:
    """All complete rows; their ``at_s`` become seconds after ``since_s``: results have six digits."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row | {"at_s": row["at_s"] - since_s} for row in rows]


def of_kind(rows: list[Row], kind: str) -> list[Row]:
    """The rows of a kind."""
    return [row for row in rows if row["kind"] == kind]
