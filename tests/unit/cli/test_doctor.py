"""``isthmus doctor``: lines, JSON, exit codes, and no torch with --quick."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from isthmus.cli.main import main
from isthmus.tools.doctor import examination
from isthmus.tools.doctor.findings import Finding, error, ok, warning

FINDINGS = (
    ok("torch", "torch 2.13.0 [cpu]", "torch/version.py"),
    warning("limits", "little shared memory", "--shm-size 16g", "/dev/shm"),
    error("limits", "no files", "ulimit -n 65536", "getrlimit"),
)


@pytest.mark.parametrize(("findings", "code"), [(FINDINGS, 1), (FINDINGS[:2], 0)])
def test_lines_and_exit_code(
    findings: tuple[Finding, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examination, "examine", lambda *_, **__: examination.Examination(findings))
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "torch   ok       torch 2.13.0 [cpu]  (torch/version.py)",
        "limits  warning  little shared memory",
        "                 --shm-size 16g",
        "                 (/dev/shm)",
    ]
    assert lines[-1] == ("1 error, 1 warning" if code else "0 errors, 1 warning")
    assert main(["doctor", "--json"]) == code
    result = json.loads(capsys.readouterr().out)
    assert (result["errors"], result["warnings"], len(result["findings"])) == (code, 1, len(findings))
    assert result["findings"][1] == {
        "subject": "limits", "level": "warning", "text": "little shared memory", "hint": "--shm-size 16g",
        "source": "/dev/shm",
    }  # fmt: skip


@pytest.mark.processes
def test_quick_imports_no_torch() -> None:
    program = (
        "import sys; from isthmus.cli.main import main; code = main(['doctor', '--quick', '--json']);"
        "print(code, *(name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules))"
    )
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    seconds = time.monotonic() - start
    report, last = result.stdout.splitlines()
    assert last == str(int(json.loads(report)["errors"] > 0)), result.stderr
    assert len({finding["subject"] for finding in json.loads(report)["findings"]}) > 8
    assert seconds < 20  # 0.5 s on a free machine; checks themselves are bounded to 2.5 s
