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
Pair = tuple[str, str]
"""Layout and precision."""


def new_pairs(trait: str, gpu: str, seen: set[Pair]) -> list[Pair]:
    """The pairs that no trait before had, else the first; added to ``seen``."""
    pairs = [pair for pair in cases(trait, gpu) if pair not in seen] or cases(trait, gpu)[:1]
    seen.update(pairs)
    return pairs


def parameters() -> list[Any]:
    """Each trait, and each layout with each precision, once; the others are ``thorough``."""
    seen: set[Pair] = set()
    quick, further = [], []
    for trait, gpu in [*((trait, "sm_90") for trait in TRAITS), *AMD.items()]:
        slow = trait in SLOW if gpu == "sm_90" else trait not in QUICK_ON_AMD
        chosen = [] if slow else new_pairs(trait, gpu, seen)
        rest = [pair for pair in cases(trait, gpu) if pair not in chosen]
        if chosen:
            quick.append(pytest.param(trait, gpu, chosen, id=f"{trait}-{gpu}"))
        if rest:
            further.append(pytest.param(trait, gpu, rest, id=f"{trait}-{gpu}-further", marks=pytest.mark.thorough))
    return quick + further


def train_steps(chosen: list[tuple[str, list[Pair]]]) -> Errors:
    """The error of each pair of each trait, or an empty text."""
    errors: Errors = {}
    for trait, pairs in chosen:
        for layout, precision in pairs:
            errors.setdefault(trait, {})[f"{layout}, {precision}"] = _train_step(trait, layout, precision)
    return errors


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

    def on(gpu: str) -> Errors:
        if gpu not in values:
            cases_of = [item.callspec.params for item in items if item.callspec.params["gpu"] == gpu]
            chosen = [(case["trait"], case["pairs"]) for case in cases_of]
            values[gpu] = fake_cuda.run(train_steps, gpu=gpu, chosen=chosen)
        return values[gpu]

    return on


@pytest.mark.parametrize(("trait", "gpu", "pairs"), parameters())
def test_step(errors: Callable[[str], Errors], trait: str, gpu: str, pairs: list[Pair]) -> None:
    result = errors(gpu)[trait]
    assert {pair: error for pair in pairs if (error := result[", ".join(pair)])} == {}
