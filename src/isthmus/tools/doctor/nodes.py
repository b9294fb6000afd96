"""``isthmus doctor --nodes``: the hosts of a job compare themselves, and the odd ones out are named."""

from __future__ import annotations

import platform as system
import re
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from operator import attrgetter

import psutil
import torch
import torch.distributed as dist

from isthmus import __version__
from isthmus.errors import UsageError
from isthmus.launch.rendezvous import rendezvous
from isthmus.platforms import rank_env
from isthmus.platforms.cpu import CpuPlatform
from isthmus.platforms.network_interfaces import route_to
from isthmus.tools.doctor.examination import Examination, examine
from isthmus.tools.doctor.findings import Finding, error, ok, run_checks, warning
from isthmus.tools.doctor.gpu.gpus import count_by_vendor, find_gpus
from isthmus.tools.doctor.gpu.torch_build import installed_torch
from isthmus.tools.doctor.machine import Machine
from isthmus.tools.doctor.measurements import Measurement, Report
from isthmus.tools.doctor.speed_checks import bench_checks
from isthmus.tools.doctor.versions import installed_versions

SLOW_SHARE = 0.9
"""A device below this share of the median is named."""
CLOCK_SECONDS = 0.5
"""A clock that differs by more is named: logs, file times and certificates disagree."""
_VARIABLES = re.compile(r"(NCCL|RCCL|GLOO|HSA|HIP|ROCR|TORCH_NCCL|UCX|FI|OMP|MKL|PYTORCH)_\w+")
_PER_HOST = re.compile(r"\w*(VISIBLE_DEVICES|NODE_?RANK|HOSTID\w*)")
"""Variables that may differ."""
_BREAKS = ("isthmus", "Python", "torch", "megatron-core", "GPUs")
"""Facts whose differences make a run fail or wrong."""
_PINGS = 5
_TIMEOUT_S = 300.0
_SUBJECT = "hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What one rank reports; the facts and findings of a host come from its first rank."""

    host: str
    local_rank: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    """Warnings and errors."""
    speeds: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    """Value and unit of each measurement; larger is better."""
    clock_offset_s: float = 0.0
    """This host's clock minus that of rank 0."""

    @property
    def device(self) -> str:
        return self.host if self.local_rank == 0 else f"{self.host} (local rank {self.local_rank})"


def examine_hosts(machine: Machine, *, bench: bool, report: Report) -> Examination:
    """Compare the hosts of a job; a collective. Rank 0 has the result, the other ranks have no findings.

    Each rank measures its device with ``bench``; the all-reduce over local ranks needs a host with one rank.

    Raises:
        UsageError: this process is not one of several ranks.
        Hang: a rank is missing, or cannot be reached.
    """
    if not rank_env.is_one_of_several_ranks():
        raise UsageError(
            "--nodes compares the hosts of a job, and this process is alone. Start it with torchrun or srun, one "
            "process per host: torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 "
            "--no-python isthmus doctor --nodes"
        )
    # Not as ranks of training on a CPU, which redirect torch.cuda: the GPUs are measured.
    with rendezvous(CpuPlatform(reason=""), join_timeout_s=_TIMEOUT_S, timeout_s=_TIMEOUT_S) as (store, _):
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("doctor", store),
            timeout=timedelta(seconds=_TIMEOUT_S),
            rank=rank_env.rank(),
            world_size=rank_env.world_size(),
        )
        try:
            reports = exchange(_local_report(machine, bench=bench, report=report))
        finally:
            dist.destroy_process_group()
    return Examination(tuple(compare(reports)) if reports else ())


def _local_report(machine: Machine, *, bench: bool, report: Report) -> NodeReport:
    speeds: dict[str, tuple[float, str]] = {}

    def add(measured: Measurement) -> None:
        speeds[measured.name] = measured.value, measured.unit

    alone = rank_env.local_world_size() == 1
    checks = bench_checks(report, add, collective=alone) if bench else ()
    first, findings = rank_env.local_rank() == 0, list[Finding]()
    if first:
        findings += examine(machine, quick=True).findings
    findings += [finding for check in checks for finding in run_checks((check,), machine, _TIMEOUT_S / 2)]
    return NodeReport(
        host=socket.gethostname(),
        local_rank=rank_env.local_rank(),
        facts=facts_of(machine) if first else {},
        findings=[finding for finding in findings if finding.level != "ok"],
        speeds=speeds,
        clock_offset_s=clock_offset(),
    )


def facts_of(machine: Machine) -> dict[str, str]:
    """What should be equal on all hosts."""
    facts = {"isthmus": __version__, "Python": system.python_version(), **installed_versions()}
    facts["torch"] = str(installed_torch() or torch.__version__)
    facts["GPUs"] = count_by_vendor(find_gpus(machine))
    for vendor, module in (("NVIDIA", "nvidia"), ("AMD", "amdgpu")):
        if version := machine.read(f"/sys/module/{module}/version"):
            facts[f"{vendor} driver"] = version
    facts["kernel"] = system.release()
    facts["processor"] = CpuPlatform(reason="").describe()
    facts["memory"] = f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
    address = machine.environment.get("MASTER_ADDR")
    route = route_to(address) if address and rank_env.rank() else None
    if route is not None:
        facts["network interface"] = route.name
    for name, value in sorted(machine.environment.items()):
        if _VARIABLES.fullmatch(name) and not _PER_HOST.fullmatch(name):
            facts[name] = value
    return facts


def exchange(mine: NodeReport) -> list[NodeReport]:
    """The reports of all ranks, on rank 0; empty on the others. Needs a process group of gloo."""
    reports: list[NodeReport | None] = [None] * dist.get_world_size()
    dist.gather_object(mine, reports if dist.get_rank() == 0 else None)
    return [report for report in reports if report is not None]


def clock_offset() -> float:
    """Seconds by which this host's clock is ahead of rank 0's, from the fastest of some round trips."""
    clock = torch.zeros((), dtype=torch.float64)
    if dist.get_rank() == 0:
        for other in range(1, dist.get_world_size()):
            for _ in range(_PINGS):
                dist.recv(clock, src=other)
                dist.send(clock.fill_(time.time()), dst=other)
        return 0.0
    trips = []
    for _ in range(_PINGS):
        start = time.time()
        dist.send(clock, dst=0)
        dist.recv(clock, src=0)
        end = time.time()
        trips.append((end - start, (start + end) / 2 - float(clock)))
    return min(trips)[1]


def compare(reports: Sequence[NodeReport]) -> list[Finding]:
    """What differs between hosts, with the names of the hosts that differ from most others."""
    reports = _with_unique_names(reports)
    hosts = {report.host: report for report in sorted(reports, key=attrgetter("host")) if report.local_rank == 0}
    different = [*_different_facts(hosts), *_clocks(hosts), *_slow_devices(reports)]
    names = ", ".join(hosts)
    facts = {name for report in hosts.values() for name in report.facts}
    speeds = {name for report in reports for name in report.speeds}
    measured = f" and {len(speeds)} measurements of {len(reports)} ranks" if speeds else ""
    summary = f"{len(hosts)} hosts compared in {len(facts)} facts{measured}: {names}"
    return [ok(_SUBJECT, summary, "each rank's report"), *different, *_host_findings(hosts)]


def _with_unique_names(reports: Sequence[NodeReport]) -> Sequence[NodeReport]:
    """Containers may all have one name, such as ``localhost``; their ranks tell them apart. In the order of ranks."""
    times = Counter(report.host for report in reports if report.local_rank == 0)
    return [
        replace(report, host=f"{report.host} (rank {rank})") if times[report.host] > 1 else report
        for rank, report in enumerate(reports)
    ]


def _different_facts(hosts: Mapping[str, NodeReport]) -> Iterator[Finding]:
    for name in dict.fromkeys(name for report in hosts.values() for name in report.facts):
        if name == "network interface":  # rank 0 has no route to itself
            values = {host: report.facts[name] for host, report in hosts.items() if name in report.facts}
        else:
            values = {host: report.facts.get(name, "not there") for host, report in hosts.items()}
        (usual, number), *others = Counter(values.values()).most_common()
        for value, _ in others:
            odd = ", ".join(host for host, host_value in values.items() if host_value == value)
            rest = "host" if number == 1 else "hosts"
            text = f"{name}: {value} on {odd}, {usual} on {number} {rest}"
            if name in _BREAKS:
                yield error(_SUBJECT, text, "Install the same versions on all hosts, and use hosts of one kind.", odd)
            else:
                yield warning(_SUBJECT, text, "Make it equal on all hosts, unless it is meant to differ.", odd)


def _clocks(hosts: Mapping[str, NodeReport]) -> Iterator[Finding]:
    middle = statistics.median_low(report.clock_offset_s for report in hosts.values())
    for host, report in hosts.items():
        ahead = report.clock_offset_s - middle
        if abs(ahead) > CLOCK_SECONDS:
            text = f"the clock of {host} is {abs(ahead):.2f} s {'ahead of' if ahead > 0 else 'behind'} the others"
            yield warning(_SUBJECT, text, "Synchronize it (chronyc tracking, timedatectl).", "round trips to rank 0")


def _slow_devices(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    for name in dict.fromkeys(name for report in reports for name in report.speeds):
        values = {report.device: report.speeds[name] for report in reports if name in report.speeds}
        usual = statistics.median_high(value for value, _ in values.values())
        low, high = (choose(values.values()) for choose in (min, max))
        text = f"{name}: {low[0]:.3g} to {high[0]:.3g} {low[1]} on {len(values)} ranks, median {usual:.3g}"
        yield ok(_SUBJECT, text, "measured by each rank")
        for device, (value, unit) in values.items():
            if value < SLOW_SHARE * usual:
                text = f"{name}: {value:.3g} {unit} on {device}, {value / usual:.0%} of the median {usual:.3g}"
                hint = (
                    "All ranks wait for the slowest: look for heat, power limits and other processes, or leave it out."
                )
                yield warning(_SUBJECT, text, hint, device)


def _host_findings(hosts: Mapping[str, NodeReport]) -> Iterator[Finding]:
    """Warnings and errors of each host, equal ones once."""
    having: dict[Finding, list[str]] = {}
    for host, report in hosts.items():
        for finding in report.findings:
            having.setdefault(finding, []).append(host)
    for finding, names in having.items():
        where = "all hosts" if len(names) == len(hosts) else ", ".join(names)
        yield Finding(finding.subject, finding.level, f"{where}: {finding.text}", finding.hint, finding.source)
