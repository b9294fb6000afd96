"""Bounds on what a step starts on a GPU: kernels of a layer, and what the host waits for."""

from __future__ import annotations

from typing import Any

import pytest

from fake_cuda.architectures import config_of
from fake_cuda.runner import FakeCuda
from fake_cuda.trace import record
from fake_cuda.world import build

pytestmark = pytest.mark.thorough

DENSE, EXPERTS = "untied, GQA, unrotated layers", "gated shared expert, qkv biases"
# Trait, settings of the rank, and the largest number of kernels of a layer, forward and backward. A region that is
# compiled counts once; the loss has its own test.
LAYERS: dict[str, tuple[str, dict[str, Any], int]] = {
    "dense": (DENSE, {}, 48),
    "dense, tp and sp": (DENSE, {"size": 2, "tp": 2}, 50),
    "dense, cp": (DENSE, {"size": 2, "cp": 2}, 72),
    "dense, fp8": (DENSE, {"precision": "fp8"}, 66),
    "experts, gfx942": (EXPERTS, {"gpu": "gfx942"}, 155),
    "experts, ep": (EXPERTS, {"size": 2, "ep": 2}, 165),
}


def steps(trait: str, **settings: Any) -> list[dict[str, Any]]:
    """Kernels and synchronizations of steps of models with 2 and 4 layers."""
    results = []
    for layers in (2, 4):
        config = config_of(trait, num_hidden_layers=layers)
        rank = build(config, **settings)
        rank.stepper.train_step([rank.batch(23, 41)])
        with record() as trace:
            rank.stepper.train_step([rank.batch(23, 41)])
        results.append({"kernels": trace.num_kernels, "syncs": trace.syncs_in()})
    return results


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_starts_few_kernels_and_blocks_nothing(fake_cuda: FakeCuda, name: str) -> None:
    trait, settings, most = LAYERS[name]
    few, more = fake_cuda.run(steps, trait=trait, **settings)
    kernels = (more["kernels"] - few["kernels"]) / 2
    assert 0 < kernels <= most
    # With ep, the host waits for the number of routed tokens of each layer, while the GPU is at work.
    waits = [sum(sync.startswith("wait ") for sync in results["syncs"]) for results in (few, more)]
    assert waits == ([2, 4] if "ep" in settings else [0, 0])
    # Else it reads once in a step.
    for results, waited in zip((few, more), waits, strict=True):
        assert len(results["syncs"]) - waited == 1 and "to host" in results["syncs"][-1]
