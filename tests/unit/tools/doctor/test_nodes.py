"""Hosts of a job that differ are named."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from isthmus.cli.main import parse_and_run
from isthmus.errors import UsageError
from isthmus.tools.doctor import nodes
from isthmus.tools.doctor.findings import warning
from isthmus.tools.doctor.machine import Machine
from isthmus.tools.doctor.nodes import NodeReport, clock_offset, compare, exchange, facts_of
from unit.tools.doctor.simulated import h100, mi300x

FACTS = {"torch": "2.9.0+rocm7.0", "GPUs": "8 AMD GPUs (gfx942)", "AMD driver": "6.12.12", "NCCL_IB_HCA": "mlx5"}
SPEED = {"GEMM bf16": (600.0, "TFLOP/s")}


def host(number: int, facts: dict[str, str] | None = None, **others: Any) -> NodeReport:
    return NodeReport(host=f"node{number}", facts={**FACTS, **(facts or {})}, **others)


def texts(reports: list[NodeReport]) -> list[tuple[str, str]]:
    return [(finding.level, finding.text) for finding in compare(reports)]


def test_equal_hosts_differ_in_nothing() -> None:
    reports = [host(n, speeds=SPEED, clock_offset_s=0.01 * n) for n in range(4)]
    summary = "4 hosts compared in 4 facts and 1 measurements of 4 ranks: node0, node1, node2, node3"
    measured = "GEMM bf16: 600 to 600 TFLOP/s on 4 ranks, median 600"
    assert texts(reports) == [("ok", summary), ("ok", measured)]


def test_odd_ones_out_are_named() -> None:
    reports = [
        host(0, clock_offset_s=0.0, speeds=SPEED),
        host(1, {"torch": "2.8.0+rocm6.4"}, clock_offset_s=-7.01, speeds=SPEED),
        host(2, {"GPUs": "7 AMD GPUs (gfx942)", "NCCL_IB_HCA": "bnxt"}, clock_offset_s=-7.0, speeds=SPEED),
        host(3, {"AMD driver": "6.10.5"}, clock_offset_s=-7.0, speeds={"GEMM bf16": (539.0, "TFLOP/s")}),
        NodeReport(host="node4", facts={name: value for name, value in FACTS.items() if name != "NCCL_IB_HCA"},
                   clock_offset_s=-7.0, speeds=SPEED),
        NodeReport(host="node4", local_rank=1, speeds={"GEMM bf16": (200.0, "TFLOP/s")}),
    ]  # fmt: skip
    assert texts(reports)[1:] == [
        ("error", "torch: 2.8.0+rocm6.4 on node1, 2.9.0+rocm7.0 on 4 hosts"),
        ("error", "GPUs: 7 AMD GPUs (gfx942) on node2, 8 AMD GPUs (gfx942) on 4 hosts"),
        ("warning", "AMD driver: 6.10.5 on node3, 6.12.12 on 4 hosts"),
        ("warning", "NCCL_IB_HCA: bnxt on node2, mlx5 on 3 hosts"),
        ("warning", "NCCL_IB_HCA: not there on node4, mlx5 on 3 hosts"),
        ("warning", "the clock of node0 is 7.00 s ahead of the others"),
        ("ok", "GEMM bf16: 200 to 600 TFLOP/s on 6 ranks, median 600"),
        ("warning", "GEMM bf16: 539 TFLOP/s on node3, 90% of the median 600"),
        ("warning", "GEMM bf16: 200 TFLOP/s on node4 (local rank 1), 33% of the median 600"),
    ]
    assert all(finding.hint for finding in compare(reports) if finding.level != "ok")


def test_hosts_of_one_name_are_told_apart() -> None:
    reports = [
        NodeReport(host="localhost", local_rank=local, facts={"torch": f"2.{node}"} if local == 0 else {}, speeds=SPEED)
        for node in range(2)
        for local in range(2)
    ]
    (_, summary), (level, different), *_ = texts(reports)
    assert summary.endswith(": localhost (rank 0), localhost (rank 2)") and summary.startswith("2 hosts")
    assert level == "error" and "localhost (rank 2)" in different


def test_findings_of_hosts_are_printed_once() -> None:
    everywhere, once = (warning("numa", text, "a hint", "proc") for text in ("balancing is on", "one node is away"))
    reports = [host(0, findings=[everywhere]), host(1, findings=[everywhere, once])]
    assert texts(reports)[1:] == [
        ("warning", "all hosts: balancing is on"), ("warning", "node1: one node is away"),
    ]  # fmt: skip


def test_facts_of_a_host(tmp_path: Path) -> None:
    def facts(files: dict[str, str], **environment: str) -> dict[str, str]:
        for name, content in files.items():
            path = tmp_path / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return facts_of(Machine(root=tmp_path, environment=environment))

    result = facts(mi300x(), NCCL_DEBUG="INFO", HIP_VISIBLE_DEVICES="0", SLURM_NODEID="3", HSA_ENABLE_SDMA="1")
    assert result["AMD driver"] == "6.12.12" and result["GPUs"] == "8 AMD GPUs (gfx942)"
    assert {name for name in result if name.isupper()} == {"NCCL_DEBUG", "HSA_ENABLE_SDMA"}
    assert {"isthmus", "Python", "torch", "megatron-core", "kernel", "processor", "memory"} <= result.keys()
    assert "8 AMD GPUs (gfx942) and 8 NVIDIA GPUs" in facts(h100())["GPUs"]


def _rank(rank: int, store: str, ahead_s: float) -> None:
    real: Callable[[], float] = time.time
    nodes.time = type("clock", (), {"time": staticmethod(lambda: real() + ahead_s * rank)})  # type: ignore[attr-defined]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    reports = exchange(host(rank, {"torch": f"2.{rank}"}, clock_offset_s=clock_offset()))
    assert bool(reports) == (rank == 0)
    if rank == 0:
        print(
            json.dumps({report.host: [report.facts["torch"], report.clock_offset_s] for report in reports}), flush=True
        )
    dist.destroy_process_group()


@pytest.mark.processes
def test_two_processes_exchange_reports(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(rank, str(tmp_path / "store"), 3.0)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    result = json.loads(capfd.readouterr().out)
    assert result["node0"] == ["2.0", 0.0] and result["node1"][0] == "2.1"
    assert result["node1"][1] == pytest.approx(3.0, abs=0.4)


def test_a_single_process_is_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="torchrun --nnodes 2 --nproc-per-node 1"):
        parse_and_run(["doctor", "--nodes"])
