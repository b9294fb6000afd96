"""Checks in a process of their own: those that end it are named, and the others run."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.tools.doctor import child_process
from isthmus.tools.doctor.child_process import run_in_child
from unit.tools.doctor.faulty_checks import check_aborts, check_good, check_hangs, check_raises

pytestmark = pytest.mark.processes


def test_checks_that_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[3]}:{Path(__file__).parents[4] / 'src'}")
    result = run_in_child((check_good, check_aborts, check_raises, check_good))
    assert [(item.subject, item.level) for item in result] == [
        ("good", "ok"), ("aborts", "error"), ("raises", "warning"), ("good", "ok")
    ]  # fmt: skip
    assert result[1].text.startswith("the check ended its process with SIGABRT: ")
    assert "Memory access fault by GPU node-1" in result[1].text
    assert "RuntimeError: HIP error: invalid device function" in result[2].text


def test_checks_after_one_that_hangs_have_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[3]}:{Path(__file__).parents[4] / 'src'}")
    monkeypatch.setattr(child_process, "_SECONDS", 0.6)
    first, second = run_in_child((check_hangs, check_hangs))
    assert "within 0.6 s" in first.text and "within 0.05 s" in second.text
