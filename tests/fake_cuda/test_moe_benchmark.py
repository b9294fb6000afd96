"""The benchmark of one MoE layer builds and runs its contestants on a GPU without a device mismatch."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

from fake_cuda.runner import FakeCuda
from fake_cuda.world import world

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def steps(family: str) -> dict[str, list[str]]:
    """Devices of the output and of the input's gradient of each contestant."""
    sys.path.insert(0, str(BENCHMARKS))
    moe_layer = importlib.import_module("moe_layer")
    world()
    sizes, device = moe_layer.GPU_SHAPES[family], torch.device("cuda")
    values = {}
    for name, (run, _) in moe_layer.contestants(family, sizes, "bf16", device).items():
        if name == "transformers-grouped":  # it counts tokens with an operator whose values a trace does not have
            continue
        hidden = torch.ones(64, sizes["hidden_size"], dtype=torch.bfloat16, device=device, requires_grad=True)
        out = run(hidden)
        out.backward(torch.ones_like(out))
        assert hidden.grad is not None
        values[name] = [str(out.device.type), str(hidden.grad.device.type)]
    return values


def test_moe_benchmark(fake_cuda: FakeCuda) -> None:
    results = fake_cuda.run(steps, family="qwen3_moe")
    assert len(results) == 4 and all(devices == ["cuda", "cuda"] for devices in results.values()), results
