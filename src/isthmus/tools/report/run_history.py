"""What a run folder has recorded: settings, metrics, events, answers, profiles. All of it is untrusted text."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isthmus.config.deprecated_names import METRICS
from isthmus.config.load import load_recorded
from isthmus.config.schema import RunConfig
from isthmus.errors import DataError, MissingInput
from isthmus.files.input_files import check_regular, read_bytes, read_json
from isthmus.recipes.run_dir import ENVIRONMENT, RunDir
from isthmus.train.row_file import parse_row

_LINE_BYTES = 1 << 20
_RECOGNIZED_BYTES = 256
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


class HistoryReader:
    """Reads a run folder repeatedly. Of its files of rows, a call of :meth:`read` parses the new rows only."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.name = name
        self._metrics, self._events, self._answers = (
            RowReader(root / file) for file in ("metrics.jsonl", "events.jsonl", "samples.jsonl")
        )
        self._columns = _Columns()
        self._event_rows = deque[dict[str, Any]](maxlen=_MOST_ROWS)
        self._answer_rows = deque[dict[str, Any]](maxlen=_MOST_ROWS)

    def read(self) -> RunHistory:
        """The history until now, also of a run that has not ended.

        Raises:
            MissingInput: it is not a run folder, or has no metrics.
            UsageError: its ``config.yaml`` is invalid, perhaps of another version.
            DataError: its ``metrics.jsonl`` has no valid row.
        """
        root, folder, notes = self.root, RunDir(self.root), list[str]()
        if not folder.config.is_file():
            raise MissingInput(f"{root} has no config.yaml, so it is not a run folder. Name the --out of a run.")
        if not self._metrics.path.is_file():
            path = self._metrics.path
            raise MissingInput(f"{path}: no such file. The run has not begun, or the file was not copied.")
        self._read_rows(notes)
        metrics = self._columns.series()
        if not metrics:
            raise DataError(f"{self._metrics.path} has no row with a step and a number. Is it the file of a run?")
        error = ""
        with suppress(OSError, DataError):
            error = read_bytes(root / "error.txt").decode("utf-8", "replace").strip().rpartition("\n")[2]
        environment: Any = {}
        try:
            environment = read_json(root / ENVIRONMENT) if (root / ENVIRONMENT).is_file() else {}
        except (DataError, OSError) as problem:
            notes.append(str(problem))
        notes += [note for reader in (self._events, self._answers) for note in reader.notes()]
        return RunHistory(
            name=self.name,
            folder=folder,
            config=load_recorded(folder.config),
            metrics=metrics,
            events=list(self._event_rows),
            answers=list(self._answer_rows),
            environment=environment if isinstance(environment, dict) else {},
            profiles=[_text(path, notes) for path in _profiles(root)],
            error=error,
            notes=notes,
        )

    def _read_rows(self, notes: list[str]) -> None:
        if self._metrics.restart_if_replaced():
            self._columns = _Columns()
        self._columns.add(self._metrics.new_rows())
        notes += self._metrics.notes()
        for reader, rows in ((self._events, self._event_rows), (self._answers, self._answer_rows)):
            if reader.restart_if_replaced():
                rows.clear()
            rows.extend(reader.new_rows())


def read_history(root: Path, name: str) -> RunHistory:
    """Read a run folder once, see :meth:`HistoryReader.read`."""
    return HistoryReader(root, name).read()


def _profiles(root: Path) -> list[Path]:
    paths = [path for path in (root / "profile").glob("rank*.md") if path.stem[4:].isdigit()]
    return sorted(paths, key=lambda path: int(path.stem[4:]))[:_MOST_RANKS]


def _text(path: Path, notes: list[str]) -> str:
    try:
        return read_bytes(path, _PROFILE_BYTES).decode("utf-8", "replace")
    except (DataError, OSError) as problem:
        notes.append(str(problem))
        return ""


class RowReader:
    """Reads the intact rows with a step of a file that grows, or is replaced when its run is resumed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        """Bytes that were read."""
        self._last_bytes = b""
        """The bytes before this position, by which the same file is recognized: rows have times and checksums."""
        self._bad_lines = 0

    def restart_if_replaced(self) -> bool:
        """Whether the file is not a continuation of what was read, so that :meth:`new_rows` reads it from the start."""
        if not self._position:
            return False
        with suppress(OSError), self.path.open("rb") as file:
            file.seek(self._position - len(self._last_bytes))
            if file.read(len(self._last_bytes)) == self._last_bytes:
                return False
        self._position, self._last_bytes, self._bad_lines = 0, b"", 0
        return True

    def new_rows(self) -> Iterator[dict[str, Any]]:
        """The rows since the last call. An incomplete last line is read again by the next call."""
        if not self.path.is_file():
            return
        check_regular(self.path)
        with self.path.open("rb") as file:
            file.seek(self._position)
            while line := file.readline(_LINE_BYTES):
                is_complete = line.endswith(b"\n") or len(line) == _LINE_BYTES
                row = _parsed(line)
                if is_complete or row is not None:
                    self._position += len(line)
                    self._last_bytes = (self._last_bytes + line)[-_RECOGNIZED_BYTES:]
                if row is not None:
                    yield row
                elif is_complete and line != b"\n":
                    self._bad_lines += 1

    def notes(self) -> list[str]:
        """A note about lines that are not rows."""
        if not self._bad_lines:
            return []
        return [f"{self.path.name}: {self._bad_lines:,} lines are not rows of a run and are left out"]


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The row in a line; None if it is damaged, or has no step."""
    try:
        row = parse_row(line.removesuffix(b"\n"))
    except ValueError:
        return None
    return row if type(row.get("step")) is int and 0 <= row["step"] < 1 << 53 else None


class _Columns:
    """Numbers of rows by key."""

    def __init__(self) -> None:
        self._columns: dict[str, tuple[array[int], array[float]]] = {}

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            for name, value in row.items():
                key = METRICS.get(name, name)
                if key == "step" or not (value is None or type(value) in (int, float)):
                    continue
                if key not in self._columns and len(self._columns) >= _MOST_METRICS:
                    continue
                steps, values = self._columns.setdefault(key, (array("q"), array("d")))
                steps.append(row["step"])
                values.append(_float(value))

    def series(self) -> dict[str, Series]:
        """The series with a finite value, in the order of the steps."""
        metrics = {}
        for key, (steps, values) in self._columns.items():
            all_steps = np.array(steps, dtype=np.int64)
            in_order = np.argsort(all_steps, kind="stable")
            series = Series(all_steps[in_order], np.array(values)[in_order])
            if np.isfinite(series.values).any():
                metrics[key] = series
        return metrics


def _float(value: float | None) -> float:
    """NaN for null, and for numbers whose sums would overflow."""
    return float("nan") if value is None or not abs(value) < _MOST_VALUE else float(value)
