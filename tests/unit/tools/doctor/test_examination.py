"""The examination ends and reports something, whatever a check does."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.tools.doctor import examination
from isthmus.tools.doctor.examination import QUICK, Examination, examine, run_checks
from isthmus.tools.doctor.findings import Finding, error, ok
from isthmus.tools.doctor.machine import Machine
from unit.tools.doctor.simulated import RDMA, h100, mi300x, simulate

VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"),
    *("SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HF_TOKEN", "HF_HOME", "NCCL_DEBUG", "MASTER_ADDR", "MASTER_PORT"),
)


def check_good(machine: Machine) -> Iterator[Finding]:
    yield ok("good", "fine", "/x")


def check_broken_driver(machine: Machine) -> Iterator[Finding]:
    yield error("broken driver", "it is broken", "mend it", "/y")
    raise SystemExit("no\nmore")


def check_hangs(machine: Machine) -> Iterator[Finding]:
    yield ok("hangs", "started", "/z")
    threading.Event().wait(30)


@pytest.mark.slow
def test_a_check_that_fails_or_hangs_is_a_warning_after_its_findings():
    start = time.monotonic()
    result = run_checks((check_hangs, check_broken_driver, check_good), Machine(), 0.2)
    assert time.monotonic() - start < 20
    assert [(item.subject, item.level) for item in result] == [
        ("hangs", "ok"),
        ("hangs", "warning"),
        ("broken driver", "error"),
        ("broken driver", "warning"),
        ("good", "ok"),
    ]
    assert "did not end within 0.2 s" in result[1].text
    assert "SystemExit: no more" in result[3].text and result[3].source.endswith("test_examination.check_broken_driver")


def test_quick_leaves_out_thorough_checks(monkeypatch):
    monkeypatch.setattr(examination, "QUICK", (check_good,))
    monkeypatch.setattr(examination, "WITH_TORCH", ())
    monkeypatch.setattr(examination, "THOROUGH", (check_broken_driver,))
    assert [finding.subject for finding in examine(Machine(), quick=True).findings] == ["good"]
    result = examine(Machine(), more=(check_good,))
    assert [finding.subject for finding in result.findings] == ["good", "good", "broken driver", "broken driver"]
    assert (result.as_dict()["errors"], result.as_dict()["warnings"]) == (1, 1)


@pytest.mark.parametrize("content", ["", "x", "-1", "9" * 30, "4: \0\ufffd=:\n\n 7 :", "0x1002", "1,2-x,-"])
def test_files_with_any_content_and_tools_with_any_output(content: str, tmp_path: Path) -> None:
    files = mi300x(2) | h100(1) | RDMA | {"/proc/loadavg": "", "/sys/fs/cgroup/memory.max": ""}
    remaining = {name for name in files if name.endswith(("/vendor", "/class"))}
    broken = {name: text if name in remaining else content for name, text in files.items()}
    tools = dict.fromkeys(("nvidia-smi", "amd-smi", "rocm-smi", "dmesg"), content)
    environment = {name: content.replace("\0", "") for name in VARIABLES}
    machine = simulate(tmp_path, broken, tools=tools, environment=environment)
    result = run_checks(QUICK, machine, 20)
    assert [(item.source, item.text) for item in result if "the check" in item.text] == []
    assert len({item.subject for item in result}) > 8


def test_every_finding_has_a_source_and_every_problem_a_hint():
    result = examine(Machine(), quick=True)
    assert isinstance(result, Examination) and result.findings
    assert all(finding.source and finding.text for finding in result.findings)
    assert all(bool(finding.hint) == (finding.level != "ok") for finding in result.findings)
