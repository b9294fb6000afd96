"""The page of a live report: built again when a run folder has changed. Nothing is written."""

from __future__ import annotations

import gzip
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from isthmus.errors import IsthmusError
from isthmus.files.folder_lock import writer_of
from isthmus.tools.report.curves import panels
from isthmus.tools.report.data_summary import DataSummary, data_summary
from isthmus.tools.report.report_page import LiveState, PageRun, page_run, render_page, run_names
from isthmus.tools.report.run_history import HistoryReader, RunHistory

_ROW_FILES = ("metrics.jsonl", "events.jsonl", "samples.jsonl", "error.txt")
_OTHER_FILES = ("config.yaml", "environment.json", "checkpoints/latest_checkpointed_iteration.txt")
_FOLDERS = ("data", "hf", "adapter", "profile")
_MOST_FILES = 1_000
"""Files of a folder that are compared."""
_PAUSE = 9.0
"""Pause after a page over the time that it took: a tenth of a core, on a machine that trains."""
_LONGEST_PAUSE_S = 10.0

Stamp = tuple[object, ...]
"""Size, time and number of files: equal if they have not changed."""


@dataclass(frozen=True)
class LivePage:
    version: int
    content: bytes
    """HTML in UTF-8."""

    @cached_property
    def compressed(self) -> bytes:
        """The content in gzip."""
        return gzip.compress(self.content, compresslevel=5, mtime=0)


class LiveReport:
    """The newest page of runs that may begin later, end, be resumed or be removed."""

    def __init__(self, folders: Sequence[Path], *, num_samples: int = 4) -> None:
        """Raises UsageError if there are too many folders."""
        self._runs = [
            _LiveRun(folder, name, num_samples) for folder, name in zip(folders, run_names(folders), strict=True)
        ]
        self._lock = threading.Lock()
        self._page: LivePage | None = None
        self._stamp: Stamp = ()
        self._next_s = 0.0

    def page(self) -> LivePage:
        """The page of the folders as they are; the one of the last call if nothing has changed, or it is very new."""
        with self._lock:
            if self._page is not None and time.monotonic() < self._next_s:
                return self._page
            stamp = tuple(run.stamp() for run in self._runs)  # before reading: a later change gives another page
            if self._page is None or stamp != self._stamp:
                start_s = time.monotonic()
                version = 1 if self._page is None else self._page.version + 1
                self._page, self._stamp = LivePage(version, self._render()), stamp
                pause_s = min(_PAUSE * (time.monotonic() - start_s), _LONGEST_PAUSE_S)
                self._next_s = time.monotonic() + pause_s
            return self._page

    def waiting(self) -> list[str]:
        """The runs that have no metrics."""
        return [run.reader.name for run in self._runs if not (run.reader.root / "metrics.jsonl").is_file()]

    def _render(self) -> bytes:
        shown, states, waiting = list[PageRun](), list[dict[str, str]](), list[tuple[str, str]]()
        for run in self._runs:
            try:
                newest = run.read(len(shown))
                states.append(_state(newest.history))
                shown.append(newest)
            except (IsthmusError, OSError) as problem:
                root = run.reader.root
                waits = f"{root} does not exist. The page shows the run when it has begun."
                waiting.append((run.reader.name, str(problem) if root.exists() else waits))
        return render_page(shown, panels([run.history for run in shown]), LiveState(states, waiting))


class _LiveRun:
    def __init__(self, folder: Path, name: str, num_samples: int) -> None:
        self.reader, self._num_samples = HistoryReader(folder, name), num_samples
        self._data: tuple[Stamp, DataSummary] | None = None

    def stamp(self) -> Stamp:
        root = self.reader.root
        return (writer_of(root), *(_file_stamp(root / name) for name in _ROW_FILES), *_other_stamps(root))

    def read(self, number: int) -> PageRun:
        """The run; its data again only if other files than those of rows have changed."""
        stamp = tuple(_other_stamps(self.reader.root))
        history = self.reader.read()
        if self._data is None or self._data[0] != stamp:
            self._data = stamp, data_summary(history.folder, history.config, self._num_samples)
        return page_run(number, history, self._data[1])


def _state(history: RunHistory) -> dict[str, str]:
    """Facts of the summary that only a live page has."""
    host = writer_of(history.folder.root)
    times, newest = history.metrics.get("time_s"), "-"
    if times is not None:
        with suppress(ValueError, OverflowError, OSError):  # no time
            at = time.localtime(times.last)
            is_today = at[:3] == time.localtime()[:3]
            newest = time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M", at)
    return {"state": "not running" if host is None else f"running on {host[:40]}", "newest row": newest}


def _other_stamps(root: Path) -> Iterator[Stamp]:
    for name in _OTHER_FILES:
        yield _file_stamp(root / name)
    for name in _FOLDERS:
        with suppress(OSError), os.scandir(root / name) as entries:
            names = sorted(entry.name for entry, _ in zip(entries, range(_MOST_FILES), strict=False))
            yield (name, *((file, *_file_stamp(root / name / file)) for file in names))


def _file_stamp(path: Path) -> Stamp:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_size, status.st_mtime_ns, status.st_ino
