"""``isthmus doctor --bench``: measurements, graded by what the device should reach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from isthmus.platforms.base import Platform
from isthmus.platforms.detect import detect
from isthmus.tools.doctor.findings import Check, Finding, error, ok, warning
from isthmus.tools.doctor.machine import Machine
from isthmus.tools.doctor.measurements import Measurement, Report, all_reduce, measure_device

OK_SHARE, WARNING_SHARE = 0.8, 0.5
"""Fractions of the data sheet: above the first is ok, below the second is an error."""
_SUBJECT = "bench"
_HINTS = {
    "GEMM": "Look for other processes on the GPU, a power limit, and heat (rocm-smi or nvidia-smi); on AMD GPUs "
    "isthmus tune may find faster kernels.",
    "memory bandwidth": "Look for other processes on the GPU and for memory errors (rocm-smi or nvidia-smi).",
    "host": "Look at the PCIe width and generation of the slot (lspci -vv), NUMA and the BIOS.",
    "all-reduce": "Set NCCL_DEBUG=INFO and look for rings over PCIe instead of NVLink or Infinity Fabric.",
}


def bench_checks(
    report: Report, add: Callable[[Measurement], None] = lambda _: None, *, collective: bool = True
) -> Sequence[Check]:
    """The checks of ``--bench``; ``collective`` is whether to include the all-reduce over local ranks.

    ``report`` gets lines of progress, and ``add`` each measurement.
    """

    def check_bench(_machine: Machine) -> Iterator[Finding]:
        platform = detect()
        yield from _graded(measure_device(platform, report))

    def check_all_reduce(_machine: Machine) -> Iterator[Finding]:
        platform = detect()
        report("all-reduce over local ranks")
        measured = _all_reduce(platform)
        if isinstance(measured, Finding):
            yield measured
        else:
            yield from _graded([measured])

    def _graded(measurements: Iterable[Measurement]) -> Iterator[Finding]:
        for measured in measurements:
            add(measured)
            yield grade(measured)

    return (check_bench, check_all_reduce) if collective else (check_bench,)


def _all_reduce(platform: Platform) -> Measurement | Finding:
    source = "isthmus.tools.doctor.all_reduce_rank"
    try:
        measured = all_reduce(platform)
    except RuntimeError as failure:
        return error(_SUBJECT, f"all-reduce over local ranks: {failure}", _HINTS["all-reduce"], source)
    if measured is None:
        return ok(_SUBJECT, "all-reduce: this machine has one GPU, so none is needed", source)
    return measured


def grade(measured: Measurement) -> Finding:
    text = f"{measured.name}: {measured.value:.3g} {measured.unit} ({measured.what})"
    if measured.reachable is None:
        return ok(_SUBJECT, text, measured.basis)
    share = measured.value / measured.reachable
    text = f"{text}, {share:.0%} of what can be reached"
    if share >= OK_SHARE:
        return ok(_SUBJECT, text, measured.basis)
    hint = next((hint for name, hint in _HINTS.items() if name in measured.name), "")
    make = warning if share >= WARNING_SHARE else error
    return make(_SUBJECT, text, hint, measured.basis)
