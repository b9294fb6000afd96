"""A plugin of pytest: a row for each test as it ends; tests that passed or were skipped before do not run again."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from gpu_turns.rows import ROWS, append, of_kind, read


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests with a row."""
    ended = {row["name"] for row in of_kind(read(Path(os.environ[ROWS])), "test") if row["outcome"] != "failed"}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in ended])
    items[:] = [item for item in items if item.nodeid not in ended]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append the outcome, and what the test has recorded."""
    if report.when != "call" and report.passed:
        return
    why = "" if report.passed else _reason(report)
    recorded: dict[str, Any] = dict(report.user_properties)
    append("test", name=report.nodeid, outcome=report.outcome, why=why, seconds=report.duration, recorded=recorded)


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = (
        report.longrepr[2]
        if isinstance(report.longrepr, tuple)
        else str(report.longrepr if crash is None else crash.message)
    )
    return re.sub(r"\s+", " ", text)[:300]
