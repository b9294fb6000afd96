"""The formula for the matmuls of a micro batch has those that ranks compute, with shapes and memory layouts."""

from __future__ import annotations

from typing import Any

import pytest

from fake_cuda.architectures import config_of
from fake_cuda.runner import FakeCuda
from fake_cuda.world import build


def matmuls(trait: str, precision: str, **parallel: Any) -> dict[str, dict[str, int]]:
    """Computed and predicted: how often each shape occurs in a micro batch of 64 tokens."""
    import isthmus.engine.linear.input_exchange as exchange
    import isthmus.engine.linear.linear as linear
    import isthmus.engine.loss.linear_cross_entropy as loss
    from isthmus.engine.linear.matmul_table import MatmulShape
    from isthmus.platforms.detect import detect
    from isthmus.recipes.plan.step_matmuls import step_matmuls

    rank = build(config_of(trait), precision=precision, **parallel)
    values: dict[str, int] = {}

    def recorded(inner: Any, operation: Any) -> Any:
        def call(*tensors: Any, **more: Any) -> Any:
            a, b = tensors[-2:]
            transposed = b.stride(0) == 1
            shape = MatmulShape(operation, a.numel() // b.size(0), *b.shape, transposed, a.dtype)
            values[str(shape)] = values.get(str(shape), 0) + 1
            return inner(*tensors, **more)

        return call

    for module, name in ((exchange, "matmul"), (loss, "matmul"), (linear, "add_matmul"), (loss, "add_matmul")):
        setattr(module, name, recorded(getattr(module, name), name))
    rank.stepper.train_step([rank.batch(20, 44)])
    predicted: dict[str, int] = {}
    for matmul in step_matmuls(rank.model.plan, rank.config, precision, detect(), [64]):
        predicted[str(matmul.shape)] = predicted.get(str(matmul.shape), 0) + matmul.count
    return {"computed": values, "predicted": predicted}


@pytest.mark.thorough_cases(
    "MLA, shared experts, groups, expert bias-bf16-parallel2", "gated shared expert, qkv biases-bf16-parallel3"
)
@pytest.mark.parametrize(
    ("trait", "precision", "parallel"),
    [
        ("untied, GQA, unrotated layers", "bf16", {}),
        ("tied, qk norm, window", "fp16", {"size": 2, "tp": 2, "sp": False}),
        ("MLA, shared experts, groups, expert bias", "bf16", {"size": 2, "tp": 2}),
        ("gated shared expert, qkv biases", "bf16", {"size": 4, "tp": 2, "ep": 2, "etp": 1}),
        ("MLA, shared experts, groups, expert bias", "fp8", {}),
    ],
)
def test_formula(fake_cuda: FakeCuda, trait: str, precision: str, parallel: dict[str, int]) -> None:
    results = fake_cuda.run(matmuls, trait=trait, precision=precision, **parallel)
    assert results["computed"] and results["computed"] == results["predicted"]
