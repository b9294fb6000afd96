"""Kernels of a decoder layer beside its matmuls and attention, where a compiled region counts as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fake_cuda import trace
from fake_cuda.runner import FakeCuda
from fake_cuda.world import build

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip


MATMULS_AND_ATTENTION = {
    "mm", "addmm", "_flash_attention_forward", "_flash_attention_backward", "flex_attention", "flex_attention_backward",
}  # fmt: skip


def layer_kernels(model_type: str) -> dict[str, int]:
    """Kernels that a third layer adds to a micro batch."""
    count_regions()
    counts = []
    for layers in (2, 3):
        rank = build({"model_type": model_type, **SIZES, "num_hidden_layers": layers})
        assert "compile: on (Triton)" in rank.model.messages
        rank.stepper.train_step([rank.batch(40, 24)])  # makes tables and buffers
        steps = []
        for micro_batches in (1, 2):
            with trace.record() as traced:
                rank.stepper.train_step([rank.batch(40, 24) for _ in range(micro_batches)])
            steps.append(traced.kernels)
        counts.append(steps[1] - steps[0])
    result = counts[1] - counts[0]
    return {name: number for name, number in result.items() if name not in MATMULS_AND_ATTENTION}


def count_regions() -> None:
    from isthmus.engine import compiled

    compiled.find_compiler = lambda device: ("Triton", "")

    def one_kernel(region: Any, *args: Any) -> Any:
        observers, trace._OBSERVERS[:] = trace._OBSERVERS[:], []
        try:
            return region.function(*args)
        finally:
            trace._OBSERVERS[:] = observers
            trace.tell("kernel", f"region {region.name}")

    compiled._Region.__call__ = one_kernel  # type: ignore[method-assign]


@pytest.mark.thorough_cases("gemma2-18", "qwen3-14")
@pytest.mark.parametrize(
    ("model_type", "bound"),
    [
        # Forward: 2 norms (the second one with the residual), heads, activation, residual. Backward: the same, and
        # 2 norm weights into the buffers.
        ("llama", 12),
        ("qwen3", 12 + 2),  # weights of 2 norms of heads
        ("gemma2", 12 + 3 * 2),  # 2 norms after the blocks
    ],
)
def test_kernels_of_a_layer(fake_cuda: FakeCuda, model_type: str, bound: int) -> None:
    results = fake_cuda.run(layer_kernels, model_type=model_type)
    assert sum(results.values()) <= bound


def test_regions_are_not_compiled_without_values(fake_cuda: FakeCuda) -> None:
    """Fake tensors run the body of a region."""
    assert fake_cuda.run(region_on_fake_tensors) == {"compiled": False, "kernels": {"mul": 1, "add_": 1}}


def region_on_fake_tensors() -> dict[str, Any]:
    from isthmus.engine.compiled import compiled_on_gpu, set_compile

    set_compile(True)
    region: Any = compiled_on_gpu(lambda x: (x * 2).add_(1))
    x = torch.ones(4, 3, device="cuda")
    with trace.record() as traced:
        region(x)
    return {
        "compiled": bool(region.versions),
        "kernels": {k: n for k, n in traced.kernels.items() if k != "ones"},
    }
