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


def probe_of_registrations(clears: bool) -> list[Any]:
    """The result of the probe and its row; without ``clears``, with memory whose error stays."""
    sys.path.insert(0, str(BENCHMARKS))
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from isthmus.engine import host_copies

    last: list[int] = []

    class Runtime:
        def cudaHostRegister(self, _address: int, _size: int, _flags: int) -> int:
            last.append(1)
            return 1

    class CheckedKernels(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.is_cuda and last:  # as torch does after a launch
                last.clear()
                raise RuntimeError("CUDA error: invalid argument")
            return out

    torch.cuda.cudart = Runtime
    if not clears:
        host_copies._clear_last_error = lambda: None
    torch.Tensor.__int__ = lambda _: 8  # type: ignore[method-assign]
    probes, rows = (importlib.import_module(f"gpu_turns.{name}") for name in ("probes_turn", "rows"))
    with tempfile.TemporaryDirectory() as folder, CheckedKernels():
        os.environ[rows.ROWS] = f"{folder}/rows.jsonl"
        try:
            result = probes.error_of_registration("cuda")
        except RuntimeError as error:
            result = str(error)
        (row,) = rows.read(Path(folder, "rows.jsonl"))
    return [result, row["error_is_kept"]]


@pytest.mark.parametrize("clears", [True, False])
def test_the_error_of_a_registration(fake_cuda: FakeCuda, clears: bool) -> None:
    expected = None if clears else "CUDA error: invalid argument"
    assert fake_cuda.run(probe_of_registrations, clears=clears) == [expected, True]


def test_bandwidth_of_the_loss(fake_cuda: FakeCuda) -> None:
    """Between events, and as a share of the bandwidth of the data sheet."""
    (row,) = fake_cuda.run(part, module="bandwidth_turn", spec=SPEC | {"contestant": "loss"})
    assert row["us"] > 0 and row["gflop"] > 0
    assert row["share"] == pytest.approx(row["gb_per_s"] / 3350)


def bandwidth_of_a_layer(contestant: str) -> dict[str, list[float]]:
    """Region -> MB and share, of a step that the recipe of a run would take."""
    from fake_cuda import regions
    from fake_cuda.world import build

    regions.install()  # before they are observed
    sys.path.insert(0, str(BENCHMARKS))

    def train(keys: dict[str, Any], precision: str, tokens: int, _spec: Any) -> None:
        rank = build(keys, precision=precision, sections={"data": {"seq_length": tokens}})
        rank.stepper.train_step([rank.batch(tokens)])

    importlib.import_module("gpu_turns.bandwidth_turn")._train = train  # type: ignore[attr-defined]
    rows = part("bandwidth_turn", SPEC | {"contestant": contestant})
    return {row["name"]: [row["mb"], row["share"]] for row in rows}


@pytest.mark.parametrize(
    ("contestant", "more"),
    [("dense", "loss.cross_entropy_gpu.losses_and_gradient"), ("experts", "moe.router_logits.bfloat16_parts")],
)
def test_bandwidth_of_regions(fake_cuda: FakeCuda, contestant: str, more: str) -> None:
    rows = fake_cuda.run(bandwidth_of_a_layer, contestant=contestant)
    common = {"AdamW", "engine.layers.norm._normalized", "engine.attention.projected_heads._heads_backward"}
    assert common | {f"engine.{more}"} <= rows.keys(), rows.keys()
    assert all(size > 0 and share > 0 for size, share in rows.values())
    tokens, width = 64, 64
    # A norm reads a residual, its input and the weight, and writes the sum, the norm and a number for each token.
    assert rows["engine.layers.norm._normalized"][0] == pytest.approx(
        (4 * 2 * tokens * width + 2 * width + 4 * tokens) / 1e6
    )


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
