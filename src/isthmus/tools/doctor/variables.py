"""Environment variables that guides recommend and that have no effect, slow training, or harm it."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.platforms.base import RunShape
from isthmus.platforms.environment import remarks_on
from isthmus.tools.doctor.findings import Finding, ok, warning
from isthmus.tools.doctor.gpu.gpus import find_gpus
from isthmus.tools.doctor.machine import Machine

_SUBJECT = "variables"


def check_variables(machine: Machine) -> Iterator[Finding]:
    remarks = remarks_on(machine.environment, RunShape(), on_gpu=bool(find_gpus(machine)))
    for remark in remarks:
        name = remark.partition("=")[0]
        yield warning(_SUBJECT, remark, f"Unset {name}, unless you need it for another program.", name)
    if not remarks:
        yield ok(_SUBJECT, "none is set that is known to slow or break training", "docs/reference/environment.md")
