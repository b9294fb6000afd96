"""What a check reports, one finding per fact; checks in threads, so that one that fails or hangs stops no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from isthmus.tools.doctor.machine import Machine

Level = Literal["ok", "warning", "error"]
"""``error``: training fails or is wrong; ``warning``: it is slower than it could be, or may fail later."""


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    """Groups findings, such as ``network``."""
    level: Level
    text: str
    hint: str
    """What to do; empty if the level is ok."""
    source: str
    """The file, variable, command or function that the fact comes from."""


Check = Callable[[Machine], Iterable[Finding]]
"""Examines one subject. It may raise any exception, or not return: :func:`examine` reports both as a warning."""


def ok(subject: str, text: str, source: str) -> Finding:
    return Finding(subject, "ok", text, "", source)


def warning(subject: str, text: str, hint: str, source: str) -> Finding:
    return Finding(subject, "warning", text, hint, source)


def error(subject: str, text: str, hint: str, source: str) -> Finding:
    return Finding(subject, "error", text, hint, source)


def warning_unless(is_fine: bool, subject: str, text: str, hint: str, source: str) -> Finding:
    return ok(subject, text, source) if is_fine else warning(subject, text, hint, source)


def run_checks(checks: Sequence[Check], machine: Machine, seconds: float) -> list[Finding]:
    """Findings in the order of the checks; a check that fails or takes longer than ``seconds`` adds a warning."""
    results: list[list[Finding]] = [[] for _ in checks]
    threads = [
        threading.Thread(target=_run_check, args=(check, machine, result), daemon=True, name=check.__name__)
        for check, result in zip(checks, results, strict=True)
    ]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    findings: list[Finding] = []
    for check, thread, result in zip(checks, threads, results, strict=True):
        thread.join(max(0.0, deadline - time.monotonic()))
        findings += tuple(result)
        subject = result[0].subject if result else subject_of(check)
        if thread.is_alive():
            findings.append(
                warning(
                    subject,
                    f"the check did not end within {seconds:g} s; a file system, a driver or a device may not answer",
                    "With --quick, checks have less time than without. If it does not end without, either, look at "
                    "dmesg and at the mounts.",
                    f"{check.__module__}.{check.__name__}",
                )
            )
    return findings


def subject_of(check: Check) -> str:
    return check.__name__.removeprefix("check_").replace("_", " ")


def _run_check(check: Check, machine: Machine, findings: list[Finding]) -> None:
    try:
        for finding in check(machine):
            findings.append(finding)
    except BaseException as failure:  # some errors of torch are not an Exception
        findings.append(
            warning(
                findings[0].subject if findings else subject_of(check),
                f"the check failed: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}",
                "The other lines do not depend on it. Report it with the output of isthmus doctor --json.",
                f"{check.__module__}.{check.__name__}",
            )
        )
