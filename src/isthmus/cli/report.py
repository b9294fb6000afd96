"""``isthmus report``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from isthmus.cli.options import TRUST, ResultOptions, argument, flag, option
from isthmus.cli.terminal import interruptible, note, show
from isthmus.errors import UsageError

_INTERRUPTED = 130
"""Exit code of a command that Ctrl-C has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions(ResultOptions):
    runs: list[Path] = argument("RUN_DIR...", "Run folders.", show_default=False)
    out: Path | None = option("FILE.html", "The report; default: report.html, of one run in its folder.")
    samples: int = option("N", "Training samples to show, of each run.", 4, min=0, max=100)
    verify: bool = flag("Read the exports as a whole, and compare them with their checkpoints.")
    live: bool = flag("Serve the page to a browser of this machine until Ctrl-C, updated while runs go.")
    port: int | None = option("N", "Port of --live; default: a free one.", min=0, max=65535)
    trust: bool = TRUST()


def report(options: ReportOptions) -> int:
    """Write one HTML file with curves, data, settings, profile, events and exports of runs.

    It needs no network. Several runs are drawn over each other, and their settings compared. A run need not have ended.
    With --live the page is not written but served, and follows its runs.
    """
    if options.live:
        return _serve(options)
    if options.port is not None:
        raise UsageError(f"--port {options.port} is the port of --live. Add --live, or omit it.")
    from isthmus.tools.report.write_report import write_report

    show(
        write_report(options.runs, options.out, num_samples=options.samples, verify=options.verify),
        as_json=options.json,
    )
    return 0


def _serve(options: ReportOptions) -> int:
    for name, value in (("--out", options.out), ("--verify", options.verify)):
        if value:
            raise UsageError(f"{name} is of a report in a file, and --live writes none. Omit one of them.")
    from isthmus.tools.report.live_report import LiveReport
    from isthmus.tools.report.live_server import LiveServer

    with (
        interruptible(),
        LiveServer(LiveReport(options.runs, num_samples=options.samples), options.port or 0) as server,
    ):
        show(server.address, as_json=options.json)
        note("Open the url in a browser; on another machine start the ssh command there first. Ctrl-C ends the report.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            note("The live report has ended. Its runs are not affected.")
    return _INTERRUPTED
