"""Writes the report of one or several runs: one HTML file with its data, style and scripts.

Everything in a run folder is untrusted: the template escapes all values, and the page's policy allows only the two
scripts of this module, by their hashes, and no network.
"""

from __future__ import annotations

import base64
import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from isthmus import __version__
from isthmus.errors import UsageError, disk_errors
from isthmus.files.atomic_write import write_atomic
from isthmus.tools.report.curves import Panel, panels
from isthmus.tools.report.data_summary import DataSummary, data_summary
from isthmus.tools.report.export_checks import ExportCheck, export_checks
from isthmus.tools.report.profile_tables import RankProfile, parse_profile
from isthmus.tools.report.run_history import RunHistory, read_history
from isthmus.tools.report.settings_diff import setting_rows
from isthmus.train.metrics import duration

_HERE = Path(__file__).parent
_MOST_RUNS = 32
_MOST_TEXT = 2_000
"""Characters of an event or an answer."""
_MOST_ANSWERS = 16
_MOST_MODEL = 40
"""Characters of a path."""
_ROUTINE = ("checkpoint", "export")
"""Events without a line in the curves."""
_SECTIONS = {
    "summary": "Summary",
    "curves": "Curves",
    "events": "Events",
    "data": "Data",
    "samples": "Samples",
    "answers": "Answers",
    "profile": "Profile",
    "export": "Export",
    "settings": "Settings",
    "environment": "Environment",
}


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
        return {
            "out": str(self.out),
            "runs": self.runs,
            "plots": self.plots,
            "num_bytes": self.num_bytes,
            "notes": self.notes,
        }


@dataclass(frozen=True, slots=True, eq=False)
class _PageRun:
    number: int
    history: RunHistory
    data: DataSummary
    profiles: list[RankProfile]
    checks: list[ExportCheck]
    answers: list[dict[str, str]]


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
    if len(folders) > _MOST_RUNS:
        raise UsageError(f"{len(folders)} runs in one report, at most {_MOST_RUNS} can be told apart. Name fewer.")
    out = out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    if out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {out} is an HTML file, so its name ends in .html. Name another file.")
    runs = [_page_run(number, folder, name, num_samples, verify) for number, (folder, name) in _with_names(folders)]
    shown = panels([run.history for run in runs])
    text = _render(runs, shown)
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, text.encode("utf-8", "replace"))  # lone surrogates
    notes = [f"{run.history.name}: {note}" for run in runs for note in (*run.history.notes, *run.data.notes)]
    return WrittenReport(out, [run.history.name for run in runs], len(shown), out.stat().st_size, notes)


def _with_names(folders: Sequence[Path]) -> list[tuple[int, tuple[Path, str]]]:
    """The folders with the names of runs: that of the folder, or the path if several have it."""
    names = [folder.absolute().name for folder in folders]
    unique = [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]
    return list(enumerate(zip(folders, unique, strict=True)))


def _page_run(number: int, folder: Path, name: str, num_samples: int, verify: bool) -> _PageRun:
    history = read_history(folder, name)
    last = history.answers[-1]["step"] if history.answers else 0
    answers = [
        {key: _clipped(row.get(key, "")) for key in ("step", "prompt", "answer")}
        for row in history.answers
        if row["step"] == last
    ]
    return _PageRun(
        number,
        history,
        data_summary(history.folder, history.config, num_samples),
        [parse_profile(text) for text in history.profiles if text],
        export_checks(history, verify=verify),
        answers[:_MOST_ANSWERS],
    )


def _render(runs: Sequence[_PageRun], shown: Sequence[Panel]) -> str:
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    scripts = [(_HERE / name).read_text(encoding="utf-8") for name in ("uplot/uPlot.iife.min.js", "page.js")]
    styles = "".join((_HERE / name).read_text(encoding="utf-8") for name in ("uplot/uPlot.min.css", "page.css"))
    groups: dict[str, list[tuple[int, Panel]]] = {}
    for number, panel in enumerate(shown):
        groups.setdefault(panel.group, []).append((number, panel))
    histories = [run.history for run in runs]
    events = _events(runs)
    marked = sorted({int(event["step"]) for event in events if event["kind"] not in _ROUTINE})
    optional = {"samples": any(run.data.samples for run in runs), "answers": any(run.answers for run in runs)}
    data = {
        "runs": len(runs),
        "events": marked,
        "panels": [{"title": panel.title, "unit": panel.unit, "curves": panel.curves} for panel in shown],
    }
    return environment.get_template("page.html").render(
        title=", ".join(history.name for history in histories),
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M"),
        policy=_policy(scripts),
        styles=Markup(styles),
        scripts=list(map(Markup, scripts)),
        sections=[(name, title) for name, title in _SECTIONS.items() if optional.get(name, True)],
        runs=runs,
        facts=[_facts(history) for history in histories],
        groups=groups,
        data=data,
        thinned=any("means" in curve for panel in shown for curve in panel.curves),
        events=events,
        marked=marked,
        settings=setting_rows([history.config for history in histories]),
        environment=_environment(histories),
    )


def _policy(scripts: Sequence[str]) -> str:
    """The scripts are known by their hashes; inline styles are widths of bars."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; form-action 'none'"


def _facts(run: RunHistory) -> dict[str, str]:
    """Name -> value of the summary."""

    def last(key: str, form: str, scale: float = 1.0) -> str:
        value = run.metrics[key].last if key in run.metrics else math.nan
        return form.format(scale * value) if math.isfinite(value) else "-"

    def total(key: str) -> float:
        return float(np.nansum(run.metrics[key].values)) if key in run.metrics else math.nan

    def typical(key: str, form: str, scale: float = 1.0) -> str:
        """The median; the first step warms up."""
        values = run.metrics[key].values[1:] if key in run.metrics else np.empty(0)
        finite = values[np.isfinite(values)]
        return form.format(scale * float(np.median(finite))) if len(finite) else "-"

    model = str(run.config.model.path or "model.config")
    seconds, tokens = total("step_time_s"), total("num_tokens")
    last_step = max(int(series.steps[-1]) for series in run.metrics.values())
    return {
        "recipe": run.config.recipe,
        "model": model if len(model) <= _MOST_MODEL else f"...{model[-_MOST_MODEL:]}",
        "steps": f"{last_step:,}",
        "loss": last("loss", "{:.4f}"),
        "validation loss": last("valid_loss", "{:.4f}"),
        "test loss": last("test_loss", "{:.4f}"),
        "tokens": f"{tokens:,.0f}" if math.isfinite(tokens) else "-",
        "time in steps": duration(seconds) if math.isfinite(seconds) else "-",
        "tokens/s": typical("tokens_per_s", "{:,.0f}"),
        "MFU": typical("mfu", "{:.1f}%", 100),
        "peak memory": last("memory_gib", "{:.2f} GiB"),
    }


def _events(runs: Sequence[_PageRun]) -> list[dict[str, Any]]:
    rows = [
        {
            "run": run.number,
            "step": row["step"],
            "kind": _clipped(row.get("event", ""))[:40],
            "text": _clipped(row.get("text", "")),
        }
        for run in runs
        for row in run.history.events
    ]
    return sorted(rows, key=lambda row: (row["step"], row["run"]))


def _environment(runs: Sequence[RunHistory]) -> dict[str, list[str]]:
    names = dict.fromkeys(str(name) for run in runs for name in run.environment)
    return {name: [_clipped(run.environment.get(name, "")) for run in runs] for name in names}


def _clipped(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}... ({len(text):,} characters)"
