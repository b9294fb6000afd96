"""Runs short tests of tests/gpu under compute-sanitizer, which finds reads and writes outside of allocations."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from certificate import REPOSITORY

from gpu_turns.cases import Absent
from gpu_turns.rows import append
from gpu_turns.tests_turn import run_pytest

PROGRAM = "compute-sanitizer"
FILES = ("loss", "attention", "compiled_regions")
LEFT_OUT = ("memory", "copy_much")
"""Tests with these in their names measure torch's allocator, which is off here."""
_SUMMARY = re.compile(r"^=+ ERROR SUMMARY: (\d+) error", re.MULTILINE)
_FIRST_ERROR = re.compile(r"^=+ (Invalid .*|Misaligned .*|Out-of-range .*)$", re.MULTILINE)


def run(spec: dict[str, Any]) -> None:
    """Append a row for each test, and one with the number of errors and the first of them.

    Raises:
        Absent: the program is not on the PATH.
        RuntimeError: memory errors, or no summary of them.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise Absent(f"{PROGRAM} is not installed: it is not on the PATH. It is part of the CUDA toolkit")
    report = Path(spec["log"]).with_name("sanitizer.txt")
    report.unlink(missing_ok=True)
    # Expected errors of calls, such as a registration that is refused, are no memory errors.
    options = ["--tool", "memcheck", "--target-processes", "all", "--report-api-errors", "no"]
    # Without its allocator each tensor of torch is an allocation, whose end the program knows.
    variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    folder = REPOSITORY / "tests" / "gpu"
    chosen = [*(str(folder / f"test_{name}.py") for name in FILES), "-k", f"not ({' or '.join(LEFT_OUT)})"]
    wrapper = [program, *options, "--log-file", str(report)]
    run_pytest(chosen, Path(spec["log"]), wrapper=wrapper, variables=variables)
    text = report.read_text() if report.exists() else ""
    summaries = [int(number) for number in _SUMMARY.findall(text)]
    if not summaries:
        raise RuntimeError(f"{PROGRAM} wrote no summary; see {report} and {spec['log']}")
    first = _FIRST_ERROR.search(text)
    errors, why = sum(summaries), "" if first is None else first.group(1)
    append("sanitizer", tool="memcheck", errors=errors, first=why)
    if errors:
        raise RuntimeError(f"memcheck: {errors} errors, the first is: {why or 'unknown'}; see {report}")
