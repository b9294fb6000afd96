"""The parts of `make gpu` whose path on a GPU differs from a dry run on a CPU; times and values are meaningless."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fake_cuda.runner import FakeCuda

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def _add_what_this_torch_lacks() -> None:
    """The allocator and NCCL of a build for GPUs."""
    import torch

    torch.cuda.memory._snapshot = lambda *_: {"allocator_settings": {"expandable_segments": True}}
    torch._C._accelerator_setAllocatorSettings = lambda _: None
    torch.cuda.nccl.version = lambda: (2, 28, 9)


def part(module: str, spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a part."""
    sys.path.insert(0, str(BENCHMARKS))
    _add_what_this_torch_lacks()
    rows = importlib.import_module("gpu_turns.rows")
    with tempfile.TemporaryDirectory() as folder:
        os.environ[rows.ROWS] = f"{folder}/rows.jsonl"
        from isthmus.tools.doctor import measurements

        measurements.COPY_BYTES = 1 << 20
        measurements.median_seconds = lambda run, _: (run(), 1.0)[1]
        importlib.import_module(f"gpu_turns.{module}").run(spec)
        result: list[dict[str, Any]] = rows.read(Path(folder, "rows.jsonl"))
        return result


def plain_turn(**fields: Any) -> list[dict[str, Any]]:
    """The rows of the plain model, whose folder is made on the CPU."""
    sys.path.insert(0, str(BENCHMARKS))
    _add_what_this_torch_lacks()
    cases, rows, workload = (importlib.import_module(f"gpu_turns.{name}") for name in ("cases", "rows", "workload"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ[rows.ROWS] = f"{folder}/rows.jsonl"
        sizes = {"seq_length": 32, "accumulation": 1, "warmup_steps": 1, "timed_steps": 1, "profiled_steps": 0}
        places = {"weights": f"{folder}/model", "tokens": f"{folder}/tokens"}
        tokens = cases.Turn(**places, **sizes, platform="cpu", dry=True)
        make = {"model": "llama-1b", "weights": tokens.weights, "turn": tokens.spec(), "device": "cpu", "dry": True}
        workload.run(make)
        turn = cases.Turn(**places, **sizes, platform="auto", dry=True, **fields)
        importlib.import_module("gpu_turns.torch_turn").run(turn.spec())
        result: list[dict[str, Any]] = rows.read(Path(folder, "rows.jsonl"))
        return result


SPEC = {"platform": "auto", "dry": True}


def test_device(fake_cuda: FakeCuda) -> None:
    (row,) = fake_cuda.run(part, module="device", spec=SPEC)
    assert row["platform"] == "cuda" and row["device_name"] == "NVIDIA H100 80GB HBM3" and row["devices"] == 1
    assert row["peak_tflops"]["bf16"] > 900


@pytest.mark.parametrize("gpu", ["sm_90", "gfx942"])
def test_probes(fake_cuda: FakeCuda, gpu: str) -> None:
    rows = fake_cuda.run(part, module="probes_turn", spec=SPEC, gpu=gpu)
    checks = {row["name"]: row for row in rows if row["kind"] == "check"}
    for name in ("grouped GEMM", "FP8 GEMM", "attention varlen", "attention sdpa", "attention blocks"):
        assert checks[name]["works"], checks[name]
    measured = [row["name"] for row in rows if row["kind"] == "measurement"]
    assert {"GEMM bf16", "GEMM fp8", "memory bandwidth", "host to device"} <= set(measured)


def test_kernels(fake_cuda: FakeCuda) -> None:
    rows = fake_cuda.run(part, module="kernels_turn", spec=SPEC)
    measured = {(row["case"], row["backend"]) for row in rows if row["ms"] is not None}
    assert {(case, name) for case in ("1 sample", "16 samples", "window") for name in ("varlen", "sdpa")} <= measured, (
        rows
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_plain_model(fake_cuda: FakeCuda, recompute: bool) -> None:
    rows = fake_cuda.run(plain_turn, model="plain", recompute=recompute)
    assert [row["kind"] for row in rows] == ["fact", "step", "step"] and rows[0]["peak_tflops"] > 900
