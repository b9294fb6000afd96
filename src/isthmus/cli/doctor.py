"""``isthmus doctor``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus.cli.options import ResultOptions, flag
from isthmus.cli.terminal import note, show
from isthmus.errors import UsageError, escaped

if TYPE_CHECKING:
    from isthmus.tools.doctor.examination import Examination
    from isthmus.tools.doctor.findings import Check

_COLORS = {"ok": "green", "warning": "yellow", "error": "red"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions(ResultOptions):
    quick: bool = flag("Only what needs no torch, no network and no measurement: under 3 seconds.")
    bench: bool = flag("Also measure GEMMs, memory, copies and all-reduce, against what the device should reach.")
    nodes: bool = flag("Under torchrun or srun: compare the hosts of the job and name those that differ.")


def doctor(options: DoctorOptions) -> int:
    """Check whether this machine can train, and what slows it down; exit code 1 if a check finds an error."""
    from isthmus.platforms.rank_env import rank

    if options.quick and options.bench:
        raise UsageError("--quick leaves out measurements, and --bench measures. Use one of them.")
    if options.quick and options.nodes:
        raise UsageError("--nodes makes the checks of --quick on each host anyway. Leave --quick out.")
    examination = _compare(options.bench) if options.nodes else _examine(options.quick, options.bench)
    if options.nodes and rank():
        return 0  # rank 0 prints
    if options.json:
        show(examination, as_json=True)
    else:
        print_findings(examination)
    return 1 if examination.count("error") else 0


def _examine(quick: bool, bench: bool) -> Examination:
    from isthmus.tools.doctor.examination import examine
    from isthmus.tools.doctor.machine import Machine

    more: Sequence[Check] = ()
    if bench:
        from isthmus.tools.doctor.speed_checks import bench_checks

        more = bench_checks(_progress)
    return examine(Machine(), quick=quick, more=more)


def _compare(bench: bool) -> Examination:
    from isthmus.tools.doctor.machine import Machine
    from isthmus.tools.doctor.nodes import examine_hosts

    return examine_hosts(Machine(), bench=bench, report=_progress)


def _progress(what: str) -> None:
    note(f"measuring: {what}")


def print_findings(examination: Examination) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Lines in a file or a pipe are not wrapped.
    console = Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 1000)
    table = Table.grid(padding=(0, 2))
    for column in ("subject", "level", "text"):
        table.add_column(column, no_wrap=column != "text", overflow="fold")
    subject = ""
    for finding in examination.findings:
        text = Text(escaped(finding.text))
        if finding.hint:
            text.append(f"\n{finding.hint}", style="bold")
        text.append(f"\n({finding.source})" if finding.hint else f"  ({finding.source})", style="dim")
        shown = "" if finding.subject == subject else finding.subject
        table.add_row(Text(shown), Text(finding.level, style=_COLORS[finding.level]), text)
        subject = finding.subject
    with console.capture() as lines:
        console.print(table)
        counts = {level: examination.count(level) for level in ("error", "warning")}
        console.print(", ".join(f"{n} {level}{'s' * (n != 1)}" for level, n in counts.items()), markup=False)
    print("\n".join(line.rstrip() for line in lines.get().splitlines()), flush=True)
