"""Checks for a child process: one that works, and ways in which a driver ends a process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

from isthmus.tools.doctor.findings import Finding, ok
from isthmus.tools.doctor.machine import Machine


def check_good(machine: Machine) -> Iterator[Finding]:
    print("a library prints")
    yield ok("good", "fine", "/x")


def check_aborts(machine: Machine) -> Iterator[Finding]:
    print("Memory access fault by GPU node-1", file=sys.stderr, flush=True)
    os.abort()
    yield ok("aborts", "never", "/x")


def check_raises(machine: Machine) -> Iterator[Finding]:
    raise RuntimeError("HIP error: invalid device function")
    yield ok("raises", "never", "/x")


def check_hangs(machine: Machine) -> Iterator[Finding]:
    time.sleep(60)
    yield ok("hangs", "never", "/x")
