"""What a check reports: one finding per fact."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
