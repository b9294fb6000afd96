"""Runs the checks, each in a thread, so that neither an exception nor a check that hangs stops the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from isthmus.doctor.device_access import check_device_files
from isthmus.doctor.findings import Check, Finding, warning
from isthmus.doctor.gpu_use import check_gpu_use
from isthmus.doctor.host import check_clock, check_memory, check_processor
from isthmus.doctor.hub_access import check_hub, check_hub_settings
from isthmus.doctor.jobs import check_job
from isthmus.doctor.limits import check_limits
from isthmus.doctor.machine import Machine
from isthmus.doctor.network import check_network, check_rdma
from isthmus.doctor.numa import check_numa
from isthmus.doctor.storage import check_disk_space, check_disk_speed
from isthmus.doctor.torch_build import check_torch_build
from isthmus.doctor.variables import check_variables
from isthmus.doctor.versions import check_versions
from isthmus.doctor.visible_devices import check_visible_gpus

QUICK: tuple[Check, ...] = (
    *(check_torch_build, check_device_files, check_visible_gpus, check_gpu_use),
    *(check_processor, check_numa, check_memory, check_limits, check_clock, check_disk_space),
    *(check_network, check_rdma, check_job, check_variables, check_versions, check_hub_settings),
)
"""Import no torch and use no network; they run at the same time."""
THOROUGH: tuple[Check, ...] = (check_disk_speed, check_hub)
"""One after the other, since some measure."""
QUICK_SECONDS, THOROUGH_SECONDS = 2.5, 120.0


@dataclass(frozen=True, slots=True)
class Examination:
    findings: tuple[Finding, ...]

    def count(self, level: str) -> int:
        return sum(finding.level == level for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "errors": self.count("error"),
            "warnings": self.count("warning"),
            "findings": [asdict(finding) for finding in self.findings],
        }


def examine(machine: Machine, *, quick: bool = False, more: Sequence[Check] = ()) -> Examination:
    """All findings about ``machine``; ``quick`` leaves out what needs torch, the network or measurements.

    ``more`` are further checks, which run last.
    """
    found = run_checks(QUICK, machine, QUICK_SECONDS if quick else THOROUGH_SECONDS)
    for check in (*(() if quick else THOROUGH), *more):
        found += run_checks((check,), machine, THOROUGH_SECONDS)
    subjects = list(dict.fromkeys(finding.subject for finding in found))
    return Examination(tuple(sorted(found, key=lambda finding: subjects.index(finding.subject))))


def run_checks(checks: Sequence[Check], machine: Machine, seconds: float) -> list[Finding]:
    """Findings in the order of the checks; a check that fails or takes longer than ``seconds`` adds a warning."""
    results: list[list[Finding]] = [[] for _ in checks]
    threads = [
        threading.Thread(target=_run_check, args=(check, machine, result), daemon=True, name=check.__name__)
        for check, result in zip(checks, results, strict=True)
    ]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    found: list[Finding] = []
    for check, thread, result in zip(checks, threads, results, strict=True):
        thread.join(max(0.0, deadline - time.monotonic()))
        found += tuple(result)
        if thread.is_alive():
            found.append(
                warning(
                    subject_of(check),
                    f"the check did not end within {seconds:g} s; a file system, a driver or a device may not answer",
                    "Run isthmus doctor without --quick. If it still does not end, look at dmesg and at the mounts.",
                    f"{check.__module__}.{check.__name__}",
                )
            )
    return found


def subject_of(check: Check) -> str:
    return check.__name__.removeprefix("check_").replace("_", " ")


def _run_check(check: Check, machine: Machine, found: list[Finding]) -> None:
    try:
        for finding in check(machine):
            found.append(finding)
    except BaseException as failure:  # some errors of torch are not an Exception
        found.append(
            warning(
                subject_of(check),
                f"the check failed: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}",
                "The other lines do not depend on it. Report it with the output of isthmus doctor --json.",
                f"{check.__module__}.{check.__name__}",
            )
        )
