"""What a run folder has recorded: settings, metrics, events, answers, profiles. All of it is untrusted text."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isthmus.config.load import load_config
from isthmus.config.schema import RunConfig
from isthmus.errors import DataError, MissingInput
from isthmus.files.input_files import check_regular, read_bytes, read_json
from isthmus.recipes.run_dir import ENVIRONMENT, RunDir
from isthmus.train.row_file import parse_row

_LINE_BYTES = 1 << 20
_MOST_METRICS = 200
_MOST_VALUE = 1e300
_MOST_ROWS = 500
"""Events, and answers."""
_MOST_RANKS = 16
_PROFILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Series:
    """One metric."""

    steps: npt.NDArray[np.int64]
    """[n], ascending."""
    values: npt.NDArray[np.float64]
    """[n], NaN where the run recorded null."""

    @property
    def last(self) -> float:
        """The last finite value; NaN without one."""
        finite = self.values[np.isfinite(self.values)]
        return float(finite[-1]) if len(finite) else float("nan")


@dataclass(frozen=True, slots=True)
class RunHistory:
    name: str
    folder: RunDir
    config: RunConfig
    metrics: Mapping[str, Series]
    """Series by key of ``metrics.jsonl``."""
    events: list[dict[str, Any]]
    """Rows of ``events.jsonl``."""
    answers: list[dict[str, Any]]
    """The newest rows of ``samples.jsonl``."""
    environment: dict[str, Any]
    profiles: list[str]
    """Markdown, by rank."""
    error: str
    """The last line of ``error.txt``."""
    notes: list[str]
    """What could not be read."""


def read_history(root: Path, name: str) -> RunHistory:
    """Read a run folder; also one whose run has not ended.

    Raises:
        MissingInput: it is not a run folder, or has no metrics.
        UsageError: its ``config.yaml`` is invalid, perhaps of another version.
        DataError: its ``metrics.jsonl`` has no valid row.
    """
    folder, path, notes = RunDir(root), root / "metrics.jsonl", list[str]()
    if not folder.config.is_file():
        raise MissingInput(f"{root} has no config.yaml, so it is not a run folder. Name the --out of a run.")
    if not path.is_file():
        raise MissingInput(f"{path}: no such file. The run has not begun, or the file was not copied.")
    metrics = _metrics(_rows(path, notes))
    if not metrics:
        raise DataError(f"{path} has no row with a step and a number. Is it the file of a run?")
    error = ""
    with suppress(OSError, DataError):
        error = read_bytes(root / "error.txt").decode("utf-8", "replace").strip().rpartition("\n")[2]
    environment: Any = {}
    try:
        environment = read_json(root / ENVIRONMENT) if (root / ENVIRONMENT).is_file() else {}
    except (DataError, OSError) as problem:
        notes.append(str(problem))
    events = deque(_rows(root / "events.jsonl", notes), _MOST_ROWS)
    answers = deque(_rows(root / "samples.jsonl", notes), _MOST_ROWS)
    return RunHistory(
        name=name,
        folder=folder,
        config=load_config(None, folder.config),
        metrics=metrics,
        events=list(events),
        answers=list(answers),
        environment=environment if isinstance(environment, dict) else {},
        profiles=[_text(path, notes) for path in _profiles(root)],
        error=error,
        notes=notes,
    )


def _profiles(root: Path) -> list[Path]:
    paths = [path for path in (root / "profile").glob("rank*.md") if path.stem[4:].isdigit()]
    return sorted(paths, key=lambda path: int(path.stem[4:]))[:_MOST_RANKS]


def _text(path: Path, notes: list[str]) -> str:
    try:
        return read_bytes(path, _PROFILE_BYTES).decode("utf-8", "replace")
    except (DataError, OSError) as problem:
        notes.append(str(problem))
        return ""


def _rows(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The intact rows with a step; other lines are counted in ``notes``. The last may be incomplete."""
    if not path.is_file():
        return
    check_regular(path)
    bad = 0
    with path.open("rb") as file:
        while line := file.readline(_LINE_BYTES):
            try:
                row = parse_row(line.removesuffix(b"\n"))
            except ValueError:
                bad += line.endswith(b"\n") or len(line) == _LINE_BYTES
                continue
            if type(row.get("step")) is int and 0 <= row["step"] < 1 << 53:
                yield row
            else:
                bad += 1
    if bad:
        notes.append(f"{path.name}: {bad:,} lines are not rows of a run and are left out")


_EARLIER_NAMES = {"learned_tokens": "loss_tokens"}
"""Keys of metrics.jsonl that have another name now."""


def _metrics(rows: Iterator[dict[str, Any]]) -> dict[str, Series]:
    columns: dict[str, tuple[array[int], array[float]]] = {}
    for row in rows:
        for name, value in row.items():
            key = _EARLIER_NAMES.get(name, name)
            if key == "step" or not (value is None or type(value) in (int, float)):
                continue
            if key not in columns and len(columns) >= _MOST_METRICS:
                continue
            steps, values = columns.setdefault(key, (array("q"), array("d")))
            steps.append(row["step"])
            values.append(_float(value))
    metrics = {}
    for key, (steps, values) in columns.items():
        in_order = np.argsort(np.frombuffer(steps, dtype=np.int64), kind="stable")
        series = Series(np.frombuffer(steps, dtype=np.int64)[in_order], np.frombuffer(values)[in_order])
        if np.isfinite(series.values).any():
            metrics[key] = series
    return metrics


def _float(value: float | None) -> float:
    """NaN for null, and for numbers whose sums would overflow."""
    return float("nan") if value is None or not abs(value) < _MOST_VALUE else float(value)
