"""Runs checks that use torch in another process: a driver or a library that aborts ends that process only."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from isthmus.tools.doctor.findings import Check, Finding, error, run_checks, subject_of
from isthmus.tools.doctor.machine import Machine

_SECONDS = 120.0
"""Limit of a check; the first use of a GPU may compile kernels."""
_AFTER_A_HANG = 1 / 12
"""Share of it for each check after one that did not end: with a driver that hangs, most do not."""


def run_in_child(checks: Sequence[Check]) -> list[Finding]:
    """Findings about this machine, in the order of the checks, which are functions of modules.

    A check that ends the process is an error, and the others run in a new one.
    """
    findings, remaining = [], list(checks)
    while remaining:
        lines, problem = _run(remaining)
        started = [line["check"] for line in lines if "check" in line]
        findings += [Finding(**line) for line in lines if "check" not in line]
        if not problem:
            break
        ended = remaining[max(0, len(started) - 1)]
        findings.append(
            error(
                subject_of(ended),
                f"the check {problem}",
                "A driver, a library of the GPU or torch itself is broken: look at dmesg, and compare the versions of "
                "driver and torch. A variable such as HSA_OVERRIDE_GFX_VERSION may be the cause.",
                f"{ended.__module__}.{ended.__name__}",
            )
        )
        remaining = remaining[max(1, len(started)) :]
    return findings


def _run(checks: Sequence[Check]) -> tuple[list[dict[str, Any]], str]:
    """Lines of the child, and how it ended; empty if it has run all checks."""
    names = [f"{check.__module__}:{check.__name__}" for check in checks]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+", errors="replace") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "isthmus.tools.doctor.child_process", str(_SECONDS), *names],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
        )
        try:
            code = child.wait(_SECONDS * len(checks) + 30)
            problem = f"ended its process with {_ending(code)}" if code else ""
        except subprocess.TimeoutExpired:
            child.kill()  # without wait: a process that waits for a dead driver does not end
            problem = f"did not end within {_SECONDS:g} s"
        except BaseException:
            child.kill()
            raise
        for file in (output, errors):
            file.seek(0)
        said = " ".join(errors.read()[-300:].split())
        complete = [line for line in output.readlines() if line.endswith("\n")]
        return [json.loads(line) for line in complete], f"{problem}: {said}" if problem and said else problem


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _main(seconds: float, names: Sequence[str]) -> None:
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no finding
    machine = Machine()
    for name in names:
        module, _, function = name.partition(":")
        print(json.dumps({"check": name}), file=output, flush=True)
        hangs = any(thread.name.startswith("check_") for thread in threading.enumerate())
        limit = seconds * _AFTER_A_HANG if hangs else seconds
        for finding in run_checks((getattr(importlib.import_module(module), function),), machine, limit):
            print(json.dumps(asdict(finding)), file=output, flush=True)
    output.flush()
    os._exit(0)  # a check that hangs has a thread, and the runtime of a broken GPU may hang at exit


if __name__ == "__main__":
    _main(float(sys.argv[1]), sys.argv[2:])
