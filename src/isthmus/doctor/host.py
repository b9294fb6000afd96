"""Processor, memory and operating system."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from isthmus.doctor.findings import Finding, ok
from isthmus.doctor.machine import Machine


def check_host(machine: Machine) -> Iterator[Finding]:
    lines = (machine.read("/proc/cpuinfo") or "").splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    yield ok("host", f"{platform.system()} {platform.release()}, {name}", "/proc/cpuinfo")
