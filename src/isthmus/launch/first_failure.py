"""How a rank ended, left in a file for the process that started it; and which of many ends was the cause.

A process has only its exit code to say what happened, and when one rank fails the others follow with errors that
are nothing but its echo. The reports carry the message and the time, so that the user hears of the cause, once.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

REPORTS_ENV = "ISTHMUS_RANK_REPORTS"
STOP_FILE = "stop"
PREEMPTED = 75
# Codes that a healthy rank may also end with because a peer is gone: bug, I/O and hang.
_ECHOES = (70, 74, 76)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """The end of one rank."""

    rank: int
    exit_code: int
    message: str = ""
    traceback: str = ""
    time_s: float = field(default_factory=time.time)
    """Seconds since the epoch."""

    def write(self, folder: Path) -> None:
        """Leave the report in ``folder``, whole or not at all."""
        path = folder / f"rank-{self.rank}.json"
        staged = path.with_suffix(".tmp")
        try:
            staged.write_text(json.dumps(asdict(self)), encoding="utf-8")
            staged.replace(path)
        except FileNotFoundError:
            pass  # the process that wanted it is gone, and its folder with it


def reports_folder() -> Path | None:
    """Where this rank is to report; None for a process that was not started as a rank by Isthmus."""
    folder = os.environ.get(REPORTS_ENV)
    return Path(folder) if folder else None


def read_reports(folder: Path) -> list[RankReport]:
    """All reports in ``folder``, by rank."""
    found = [RankReport(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank-*.json")]
    return sorted(found, key=lambda report: report.rank)


def report_of_death(rank: int, exit_code: int, *, time_s: float, last_words: str = "") -> RankReport:
    """The report that a rank could not write itself.

    Args:
        rank: the rank.
        exit_code: as subprocess has it; -N for signal N.
        time_s: when the death was noticed.
        last_words: the last line it printed.
    """
    printed = f" It last printed: {last_words}" if last_words else ""
    if exit_code >= 0:
        message = f"rank {rank} ended with exit code {exit_code} without a word of its own.{printed}"
        return RankReport(rank=rank, exit_code=exit_code, message=message, time_s=time_s)
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "a signal"
    why = " The system may have run out of memory: lower train.micro_batch_size." if name == "SIGKILL" else ""
    message = f"rank {rank} was ended by {name} (signal {-exit_code}).{why}{printed}"
    return RankReport(rank=rank, exit_code=128 - exit_code, message=message, time_s=time_s)


def cause(reports: Iterable[RankReport], deaths: Mapping[int, RankReport]) -> RankReport | None:
    """The report that explains why the run ended early, or None if every rank finished.

    An error that says what is wrong goes before the ones a rank also meets when a peer goes away; among the others
    the earliest counts. Being asked to stop is the cause only if nothing failed.
    """
    ended = list(reports)
    spoken = {report.rank for report in ended}
    ended += [report for rank, report in deaths.items() if rank not in spoken]
    failed = [report for report in ended if report.exit_code not in (0, PREEMPTED)]
    definite = [r for r in failed if r.exit_code not in _ECHOES and r.rank in spoken]
    for group in (definite, failed, [report for report in ended if report.exit_code == PREEMPTED]):
        if group:
            return min(group, key=lambda report: report.time_s)
    return None
