"""Runs one file of tests/gpu with pytest and counts the outcomes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from certificate import REPOSITORY


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Counts, and the failed and skipped tests with the first line of the reason; the output goes to ``spec["log"]``.

    Raises:
        RuntimeError: pytest ended without a report.
    """
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", spec["file"], "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
        }
        with Path(spec["log"]).open("a") as log:
            done = subprocess.run(
                command,
                cwd=REPOSITORY,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=spec["timeout_s"],
            )
        if not report.exists():
            raise RuntimeError(f"pytest {spec['file']} ended with code {done.returncode}; see {spec['log']}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes: dict[str, dict[str, str]] = {"failed": {}, "skipped": {}}
    for case in cases:
        for child in case:
            kind = {"failure": "failed", "error": "failed", "skipped": "skipped"}.get(child.tag)
            if kind is not None:
                outcomes[kind][str(case.get("name"))] = re.sub(r"\s+", " ", child.get("message") or "")[:200]
    passed = len(cases) - len(outcomes["failed"]) - len(outcomes["skipped"])
    return {"passed": passed, **outcomes, "time_s": sum(float(case.get("time") or 0) for case in cases)}
