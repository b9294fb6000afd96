"""The page of a report: HTML with its data, style and scripts.

Everything in a run folder is untrusted: the template escapes all values, and the page's policy allows only the scripts
of this module, by their hashes, and no network. A live page may ask its server for a newer one.
"""

from __future__ import annotations

import base64
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from isthmus import __version__
from isthmus.errors import UsageError
from isthmus.tools.report.curves import Panel
from isthmus.tools.report.data_summary import DataSummary
from isthmus.tools.report.export_checks import ExportCheck, export_checks
from isthmus.tools.report.profile_tables import RankProfile, parse_profile
from isthmus.tools.report.run_history import RunHistory
from isthmus.tools.report.settings_diff import clipped, setting_rows
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
_TEXTS = ("state", "newest row", "recipe", "model")
"""Facts that are no numbers."""
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


@dataclass(frozen=True, slots=True, eq=False)
class PageRun:
    """What the page shows of a run."""

    number: int
    history: RunHistory
    data: DataSummary
    profiles: list[RankProfile]
    checks: list[ExportCheck]
    answers: list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class LiveState:
    """What a page that is served shows besides the report."""

    states: Sequence[Mapping[str, str]]
    """Facts for the summary, by run that is shown."""
    waiting: Sequence[tuple[str, str]]
    """(name, reason) of runs that cannot be read now."""


def run_names(folders: Sequence[Path]) -> list[str]:
    """The names of runs: that of the folder, or the path if several have it.

    Raises:
        UsageError: there are more runs than a page can show.
    """
    if len(folders) > _MOST_RUNS:
        raise UsageError(f"{len(folders)} runs in one report, at most {_MOST_RUNS} can be told apart. Name fewer.")
    names = [folder.absolute().name for folder in folders]
    return [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]


def page_run(number: int, history: RunHistory, data: DataSummary, *, verify: bool = False) -> PageRun:
    """The run with checks of its exports; ``verify`` reads the exports as a whole."""
    last = history.answers[-1]["step"] if history.answers else 0
    answers = [
        {
            "step": str(row["step"]),
            "prompt": _clipped(row.get("prompt", "")),
            "answer": _clipped(row.get("answer", row.get("completion", ""))),
            "reward": _number(row.get("reward", "")),
        }
        for row in history.answers
        if row["step"] == last
    ]
    return PageRun(
        number,
        history,
        data,
        [parse_profile(text) for text in history.profiles if text],
        export_checks(history, verify=verify),
        answers[:_MOST_ANSWERS],
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html")


def render_page(runs: Sequence[PageRun], shown: Sequence[Panel], live: LiveState | None = None) -> bytes:
    """The page in UTF-8; with ``live`` one that asks for newer ones at its own address."""
    files = ("uplot/uPlot.iife.min.js", *(["live.js"] if live else []), "page.js")
    scripts = [(_HERE / name).read_text(encoding="utf-8") for name in files]
    styles = "".join((_HERE / name).read_text(encoding="utf-8") for name in ("uplot/uPlot.min.css", "page.css"))
    groups: dict[str, list[tuple[int, Panel]]] = {}
    for number, panel in enumerate(shown):
        groups.setdefault(panel.group, []).append((number, panel))
    histories = [run.history for run in runs]
    waiting = live.waiting if live else []
    events = _events(runs)
    marked = sorted({int(event["step"]) for event in events if event["kind"] not in _ROUTINE})
    optional = {"samples": any(run.data.samples for run in runs), "answers": any(run.answers for run in runs)}
    data = {
        "runs": len(runs),
        "events": marked,
        "panels": [{"title": panel.title, "unit": panel.unit, "curves": panel.curves} for panel in shown],
    }
    states = live.states if live else [{} for _ in runs]
    sections = [(name, title) for name, title in _SECTIONS.items() if optional.get(name, True)]
    text = _template().render(
        title=", ".join([*(history.name for history in histories), *(name for name, _ in waiting)]),
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M:%S" if live else "%Y-%m-%d %H:%M"),
        policy=_policy(scripts, is_live=live is not None),
        styles=Markup(styles),
        scripts=list(map(Markup, scripts)),
        sections=sections if runs else sections[:1],
        runs=runs,
        facts=[{**state, **_facts(history)} for state, history in zip(states, histories, strict=True)],
        texts=_TEXTS,
        is_live=live is not None,
        waiting=waiting,
        groups=groups,
        data=data,
        thinned=any("means" in curve for panel in shown for curve in panel.curves),
        events=events,
        marked=marked,
        settings=setting_rows([history.config for history in histories]) if runs else [],
        environment=_environment(histories),
    )
    return text.encode("utf-8", "replace")  # lone surrogates


def _policy(scripts: Sequence[str], *, is_live: bool) -> str:
    """The scripts are known by their hashes; inline styles are widths of bars."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; form-action 'none'"
    return f"{policy}; connect-src 'self'" if is_live else policy


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


def _events(runs: Sequence[PageRun]) -> list[dict[str, Any]]:
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


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else _clipped(value)


def _clipped(value: Any) -> str:
    return clipped(str(value), _MOST_TEXT)
