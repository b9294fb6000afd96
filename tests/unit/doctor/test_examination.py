"""The examination ends and reports something, whatever a check does."""

import threading
import time
from collections.abc import Iterator

from isthmus.doctor import examination
from isthmus.doctor.examination import Examination, examine, run_checks
from isthmus.doctor.findings import Finding, error, ok
from isthmus.doctor.machine import Machine


def check_good(machine: Machine) -> Iterator[Finding]:
    yield ok("good", "fine", "/x")


def check_broken_driver(machine: Machine) -> Iterator[Finding]:
    yield error("broken driver", "it is broken", "mend it", "/y")
    raise SystemExit("no\nmore")


def check_hangs(machine: Machine) -> Iterator[Finding]:
    yield ok("hangs", "started", "/z")
    threading.Event().wait(30)


def test_a_check_that_fails_or_hangs_is_a_warning_after_its_findings():
    start = time.monotonic()
    found = run_checks((check_hangs, check_broken_driver, check_good), Machine(), 0.2)
    assert time.monotonic() - start < 2
    assert [(one.subject, one.level) for one in found] == [
        ("hangs", "ok"),
        ("hangs", "warning"),
        ("broken driver", "error"),
        ("broken driver", "warning"),
        ("good", "ok"),
    ]
    assert "did not end within 0.2 s" in found[1].text
    assert "SystemExit: no more" in found[3].text and found[3].source.endswith("test_examination.check_broken_driver")


def test_quick_leaves_out_thorough_checks(monkeypatch):
    monkeypatch.setattr(examination, "QUICK", (check_good,))
    monkeypatch.setattr(examination, "WITH_TORCH", ())
    monkeypatch.setattr(examination, "THOROUGH", (check_broken_driver,))
    assert [one.subject for one in examine(Machine(), quick=True).findings] == ["good"]
    found = examine(Machine(), more=(check_good,))
    assert [one.subject for one in found.findings] == ["good", "good", "broken driver", "broken driver"]
    assert (found.as_dict()["errors"], found.as_dict()["warnings"]) == (1, 1)


def test_every_finding_has_a_source_and_every_problem_a_hint():
    found = examine(Machine(), quick=True)
    assert isinstance(found, Examination) and found.findings
    assert all(one.source and one.text for one in found.findings)
    assert all(bool(one.hint) == (one.level != "ok") for one in found.findings)
