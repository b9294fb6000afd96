"""A training step of every trait of an architecture, in every layout and precision, on NVIDIA and AMD devices."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest

from fake_cuda.architectures import LAYOUTS, TRAITS, cases, config_of
from fake_cuda.runner import FakeCuda
from fake_cuda.trace import record
from fake_cuda.world import build

Errors = dict[str, dict[str, str]]
AMD = {trait: ("gfx942", "gfx950")[number % 2] for number, trait in enumerate(TRAITS)}
"""They have different FP8 types."""
SLOW = {
    "Mamba-1",
    "attention beside Mamba-2, multipliers",
    "delta nets with decays of channels",
    "delta nets with full-rank gates, gates of heads",
    "selected keys",
    "short convolutions",
    "xIELU",
}
QUICK_ON_AMD = {"tied, qk norm, window", "untied, GQA, unrotated layers"}
"""One with each FP8 type; the other traits are traced on AMD devices by `make test-all`."""
CASES = [
    *(pytest.param(trait, "sm_90", marks=[pytest.mark.thorough] * (trait in SLOW)) for trait in TRAITS),
    *(
        pytest.param(trait, gpu, marks=[pytest.mark.thorough] * (trait not in QUICK_ON_AMD))
        for trait, gpu in AMD.items()
    ),
]


def train_steps(chosen: dict[str, list[tuple[str, str]]]) -> Errors:
    """The error of each (layout, precision) of each trait, or an empty text."""
    return {
        trait: {f"{layout}, {precision}": _train_step(trait, layout, precision) for layout, precision in pairs}
        for trait, pairs in chosen.items()
    }


def _train_step(trait: str, layout: str, precision: str) -> str:
    try:
        rank = build(config_of(trait), precision=precision, **LAYOUTS[layout])
        with record() as trace:
            rank.stepper.train_step([rank.batch(23, 41)] * LAYOUTS[layout].get("pp", 1))
        assert trace.num_kernels
        return ""
    except Exception:
        return traceback.format_exc()[-4500:]


@pytest.fixture(scope="module")
def errors(fake_cuda: FakeCuda, request: pytest.FixtureRequest) -> Callable[[str], Errors]:
    """All selected cases of a GPU share a process, and so what torch learns about the operators."""
    values: dict[str, Errors] = {}
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    selected = {(item.callspec.params["trait"], item.callspec.params["gpu"]) for item in items}

    def on(gpu: str) -> Errors:
        if gpu not in values:
            chosen = {trait: cases(trait, gpu) for trait in TRAITS if (trait, gpu) in selected}
            values[gpu] = fake_cuda.run(train_steps, gpu=gpu, chosen=chosen)
        return values[gpu]

    return on


@pytest.mark.parametrize(("trait", "gpu"), CASES)
def test_step(errors: Callable[[str], Errors], trait: str, gpu: str) -> None:
    result = errors(gpu)[trait]
    assert result and {case: error for case, error in result.items() if error} == {}
