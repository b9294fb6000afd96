"""Writes the report of one or several runs: one HTML file with its data, style and scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isthmus.errors import UsageError, disk_errors
from isthmus.files.atomic_write import write_atomic
from isthmus.tools.report.curves import panels
from isthmus.tools.report.data_summary import data_summary
from isthmus.tools.report.report_page import PageRun, page_run, render_page, run_names
from isthmus.tools.report.run_history import read_history


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """Result of ``isthmus report``."""

    out: Path
    runs: list[str]
    plots: int
    num_bytes: int
    notes: list[str]
    """What could not be read."""

    def as_dict(self) -> dict[str, Any]:
        """The result for ``--json``."""
        return asdict(self) | {"out": str(self.out)}


def write_report(
    folders: Sequence[Path], out: Path | None = None, *, num_samples: int = 4, verify: bool = False
) -> WrittenReport:
    """Write a report; an existing one is replaced.

    Args:
        folders: of runs, also of runs that have not ended.
        out: the HTML file; None: ``report.html``, of one run in its folder.
        num_samples: samples of the training data of each run.
        verify: read the exports as a whole, and compare them with their checkpoints.

    Raises:
        MissingInput, UsageError, DataError: a folder is not that of a run, or is damaged.
        NoSpace, IOFailure: the file cannot be written.
    """
    out = out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    if out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {out} is an HTML file, so its name ends in .html. Name another file.")
    runs = list[PageRun]()
    for folder, name in zip(folders, run_names(folders), strict=True):
        history = read_history(folder, name)
        data = data_summary(history.folder, history.config, num_samples)
        runs.append(page_run(len(runs), history, data, verify=verify))
    shown = panels([run.history for run in runs])
    content = render_page(runs, shown)
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, content)
    notes = [f"{run.history.name}: {note}" for run in runs for note in (*run.history.notes, *run.data.notes)]
    return WrittenReport(out, [run.history.name for run in runs], len(shown), len(content), notes)
