"""``isthmus report``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.options import Debug, Json, Trust
from isthmus.cli.terminal import show


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Run folders.", show_default=False)]
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="The report; default: report.html, of one run in its folder."),
    ] = None
    samples: Annotated[
        int, typer.Option(min=0, max=100, metavar="N", help="Training samples to show, of each run.")
    ] = 4
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read the exports as a whole, and compare them with their checkpoints."),
    ] = False
    trust: Trust = False
    debug: Debug = False
    json: Json = False


def report(options: ReportOptions) -> int:
    """Write one HTML file with curves, data, settings, profile, events and exports of runs.

    It needs no network. Several runs are drawn over each other, and their settings compared. A run need not have ended.
    """
    from isthmus.tools.report.write_report import write_report

    show(
        write_report(options.runs, options.out, num_samples=options.samples, verify=options.verify),
        as_json=options.json,
    )
    return 0
