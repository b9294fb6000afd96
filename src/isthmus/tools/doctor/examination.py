"""All checks of a machine, and their findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from isthmus.tools.doctor.child_process import run_in_child
from isthmus.tools.doctor.findings import Check, Finding, run_checks
from isthmus.tools.doctor.gpu.device_access import check_device_files
from isthmus.tools.doctor.gpu.gpu_use import check_gpu_use, check_kernel_log
from isthmus.tools.doctor.gpu.torch_build import check_torch_build
from isthmus.tools.doctor.gpu.torch_devices import check_devices
from isthmus.tools.doctor.gpu.torch_kernels import check_attention, check_collectives, check_compiler, check_gemms
from isthmus.tools.doctor.gpu.visible_devices import check_visible_gpus
from isthmus.tools.doctor.host import check_clock, check_memory, check_numa, check_processor
from isthmus.tools.doctor.hub_access import check_hub, check_hub_settings
from isthmus.tools.doctor.jobs import check_job
from isthmus.tools.doctor.limits import check_limits
from isthmus.tools.doctor.machine import Machine, run_tool
from isthmus.tools.doctor.network import check_network, check_rdma
from isthmus.tools.doctor.storage import check_disk_space, check_disk_speed
from isthmus.tools.doctor.variables import check_variables
from isthmus.tools.doctor.versions import check_versions

QUICK: tuple[Check, ...] = (
    *(check_torch_build, check_device_files, check_visible_gpus, check_gpu_use, check_kernel_log),
    *(check_processor, check_numa, check_memory, check_limits, check_clock, check_disk_space),
    *(check_network, check_rdma, check_job, check_variables, check_versions, check_hub_settings),
)
"""Import no torch and use no network; they run at the same time."""
WITH_TORCH: tuple[Check, ...] = (check_devices, check_attention, check_gemms, check_compiler, check_collectives)
THOROUGH: tuple[Check, ...] = (check_disk_speed, check_hub)
QUICK_SECONDS, THOROUGH_SECONDS, MEASUREMENT_SECONDS = 2.5, 30.0, 120.0
QUICK_TOOL_SECONDS = 1.0
"""A check uses two commands of a tool."""


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

    ``more`` are measurements, which run last, one after the other.
    """
    if quick and machine.run_tool is run_tool:
        machine = replace(machine, run_tool=partial(run_tool, seconds=QUICK_TOOL_SECONDS))
    findings = run_checks(QUICK, machine, QUICK_SECONDS if quick else THOROUGH_SECONDS)
    if not quick:
        findings += run_in_child(WITH_TORCH)
        findings += run_checks(THOROUGH, machine, THOROUGH_SECONDS)
    for check in more:
        findings += run_checks((check,), machine, MEASUREMENT_SECONDS)
    subjects = list(dict.fromkeys(finding.subject for finding in findings))
    return Examination(tuple(sorted(findings, key=lambda finding: subjects.index(finding.subject))))
